"""Ports a small transformer from PyTorch to flax with query and key, of equal shapes, swapped, and finds the bug."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from gradcombine.verify import first_divergence, record
from gradcombine.verify.diff.comparing import Allowed, diff
from gradcombine.verify.diff.dumps import open_dump

VOCABULARY, DIM, HEADS, LENGTH, STEPS, RATE = 32, 16, 4, 12, 3, 0.1

ALLOWED = {"gradients": Allowed(relative=1e-4), "params": Allowed(relative=1e-4)}
"""Kernels round differently, by about 1e-6 of a leaf's largest element."""


def batches() -> list[np.ndarray]:
    """Sequences that count up in steps of 1 to 3, so that the next token follows from the last two."""
    rng = np.random.default_rng(0)
    starts, strides = rng.integers(0, VOCABULARY, (STEPS, 8, 1)), rng.integers(1, 4, (STEPS, 8, 1))
    return list((starts + strides * np.arange(LENGTH + 1)) % VOCABULARY)


class Block(torch.nn.Module):
    """The original model: embedding, causal attention, a dense layer, logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, DIM)
        self.norm = torch.nn.LayerNorm(DIM)
        # Without biases, since the keys' bias has no effect: its gradient is only rounding error in any framework.
        self.attention = torch.nn.MultiheadAttention(DIM, HEADS, bias=False, batch_first=True)
        self.mlp = torch.nn.Linear(DIM, DIM)
        self.logits = torch.nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        later = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)
        x = self.embed(tokens)
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=later, need_weights=False)[0]
        return self.logits(x + torch.relu(self.mlp(x)))


class Port(nn.Module):
    """The ported model."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, DIM, name="embed")(tokens)
        y = nn.LayerNorm(epsilon=1e-5, name="norm")(x)
        attention = nn.MultiHeadDotProductAttention(HEADS, use_bias=False, name="attention")
        x = x + attention(y, mask=nn.make_causal_mask(tokens))
        return nn.Dense(VOCABULARY, name="logits")(x + nn.relu(nn.Dense(DIM, name="mlp")(x)))


def ported(old: dict[str, np.ndarray], parts: tuple[str, str, str]) -> Any:
    """The original weights in the layout of the port; ``parts`` names the three blocks of in_proj."""
    attention: Any = {"out": {"kernel": old["attention.out_proj.weight"].T.reshape(HEADS, -1, DIM)}}
    for part, kernel in zip(parts, np.split(old["attention.in_proj_weight"], 3), strict=True):
        attention[part] = {"kernel": kernel.T.reshape(DIM, HEADS, -1)}
    dense = {name: {"kernel": old[f"{name}.weight"].T, "bias": old[f"{name}.bias"]} for name in ("mlp", "logits")}
    norm = {"scale": old["norm.weight"], "bias": old["norm.bias"]}
    embed = {"embedding": old["embed.weight"]}
    return jax.tree.map(jnp.asarray, {"embed": embed, "norm": norm, "attention": attention, **dense})


def torch_run(trace: Path, model: Block) -> None:
    """The original run, which is correct."""
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    with record(trace) as recorder:
        for step, rows in enumerate(batches()):
            tokens = torch.tensor(rows)
            optimizer.zero_grad()
            logits = model(tokens[:, :-1])
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            recorder(step, inputs=rows, gradients={name: p.grad for name, p in model.named_parameters()})
            optimizer.step()
            recorder(step, params=dict(model.named_parameters()))


def flax_run(trace: Path, params: Any) -> None:
    """The run of the port."""

    @jax.jit
    def gradients(params: Any, tokens: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            logits: Any = Port().apply({"params": params}, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        return jax.grad(loss)(params)

    with record(trace) as recorder:
        for step, rows in enumerate(batches()):
            grads = gradients(params, jnp.asarray(rows))
            params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
            recorder(step, inputs=rows, gradients=grads, params=params)


def main() -> None:
    torch.manual_seed(0)
    model = Block()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.pt"
        torch.save(model.state_dict(), file)
        old = {name: entry.whole() for name, entry in open_dump(file).items()}
        torch_run(Path(folder) / "torch", model)
        for name, parts in (("as ported", ("key", "query", "value")), ("fixed", ("query", "key", "value"))):
            params = ported(old, parts)
            directory = Path(folder) / name.replace(" ", "_")
            with record(directory / "weights") as recorder:
                recorder(0, params=params)
            report = diff(open_dump(file), open_dump(directory / "weights" / "step_00000000.npz"))
            print(f"{name}: {sum(row.passes for row in report.rows)} of {len(report.rows)} leaves have the same bits")
            for a, b in report.mixed_up:
                print(f"  {a} resembles {b}")
            flax_run(directory / "run", params)
            divergence = first_divergence(Path(folder) / "torch", directory / "run", allowed=ALLOWED)
            print(f"  {divergence or f'{STEPS} steps agree'}")


if __name__ == "__main__":
    main()
