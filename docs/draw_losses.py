"""Draws the loss under a mean of means: `python docs/draw_losses.py` writes docs/static/losses-*.svg.

Trains a word classifier by gradient descent on 32 sentences of 2 to 40 words, three times: on one batch, on four
microbatches weighted by their number of words, and on four microbatches whose means are averaged.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

import gradcombine as gc

FOLDER = Path(__file__).parent / "static"
THEMES = {
    "light": {"text": "#1f2328", "quiet": "#57606a", "line": "#d0d7de", "right": "#1a7f37", "wrong": "#bc4c00"},
    "dark": {"text": "#e6edf3", "quiet": "#9da7b3", "line": "#3d444d", "right": "#3fb950", "wrong": "#f0883e"},
}
WIDTH, HEIGHT, EDGE, TOP, STEPS, RATE = 480, 270, 40, 64, 60, 1.0


def sentences() -> list[tuple[np.ndarray, np.ndarray]]:
    """Each sentence's words as vectors, and their labels, which depend on the length of the sentence."""
    rng = np.random.default_rng(0)
    data = list[tuple[np.ndarray, np.ndarray]]()
    for length in np.linspace(2, 40, 32).astype(int):
        words = rng.normal(size=(length, 8))
        data.append((words, np.sign(words[:, 0] + words[:, 1] * (1 if length > 12 else -2))))
    return data


def concatenated(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    words, labels = zip(*parts, strict=True)
    return np.concatenate(words), np.concatenate(labels)


def gradient(w: np.ndarray, words: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Gradient of the mean logistic loss."""
    return -(labels / (1 + np.exp(labels * (words @ w)))) @ words / len(words)


@cache
def curves() -> dict[str, list[float]]:
    """Mean loss over all words after each step, by method."""
    data = sentences()
    batch, microbatches = concatenated(data), [concatenated(data[i : i + 8]) for i in range(0, 32, 8)]
    counts = [len(labels) for _, labels in microbatches]
    methods = {
        "one batch": lambda w: gradient(w, *batch),
        "weighted by words": lambda w: gc.mean([gradient(w, *part) for part in microbatches], counts),
        "mean of means": lambda w: gc.mean([gradient(w, *part) for part in microbatches]),
    }
    losses = {name: list[float]() for name in methods}
    for name, combined in methods.items():
        w = np.zeros(8)
        for _ in range(STEPS):
            w = w - RATE * combined(w)
            losses[name].append(float(np.logaddexp(0, -batch[1] * (batch[0] @ w)).mean()))
    return losses


def picture(theme: str) -> str:
    """The curves as SVG; weighted microbatches are dots on the curve of one batch."""
    colors, losses = THEMES[theme], curves()
    least, most = (f([f(curve) for curve in losses.values()]) for f in (min, max))

    def at(step: int, loss: float) -> tuple[float, float]:
        x = EDGE + (WIDTH - 2 * EDGE) * step / (STEPS - 1)
        return round(x, 1), round(TOP + (HEIGHT - TOP - EDGE) * (most - loss) / (most - least), 1)

    def line(name: str, color: str) -> str:
        points = " ".join(f"{x},{y}" for x, y in (at(i, loss) for i, loss in enumerate(losses[name])))
        return f'<polyline points="{points}" fill="none" stroke="{colors[color]}" stroke-width="2"/>'

    def text(x: float, y: float, words: str, color: str, size: int = 13, extra: str = "") -> str:
        return f'<text x="{x}" y="{y}" fill="{colors[color]}" font-size="{size}"{extra}>{words}</text>'

    dots = (at(i, losses["weighted by words"][i]) for i in range(0, STEPS, 4))
    drawn = [
        text(8, 22, "Loss per word, sentences of 2 to 40 words", "text", 16, ' font-weight="600"'),
        text(8, 42, f"{STEPS} steps of gradient descent, four microbatches each", "quiet"),
        f'<path d="M{EDGE} {TOP}V{HEIGHT - EDGE}H{WIDTH - EDGE}" fill="none" stroke="{colors["line"]}"/>',
        line("one batch", "right"),
        line("mean of means", "wrong"),
        *(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{colors["right"]}"/>' for x, y in dots),
    ]
    for name, color, shift in (("mean of means", "wrong", -8), ("one batch", "right", 18)):
        loss = losses[name][-1]
        label = f"{name}: {loss:.3f}" if color == "wrong" else f"one batch; dots: weighted by words: {loss:.3f}"
        drawn.append(text(WIDTH - EDGE, at(STEPS - 1, loss)[1] + shift, label, color, 13, ' text-anchor="end"'))
    style = "font-family:system-ui,-apple-system,sans-serif"
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    label = "The loss under a mean of means stays above that of one batch; weighted microbatches follow it"
    parts = "\n".join(drawn)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}" style="{style}">'
    return f"{head}\n{parts}\n</svg>\n"


if __name__ == "__main__":
    for name in THEMES:
        (FOLDER / f"losses-{name}.svg").write_text(picture(name))
