"""Names of leaves, brought to a form that does not depend on the framework."""

from __future__ import annotations

import re

WRAPPERS = frozenset(
    (
        *("params", "param", "parameters", "weights", "vars", "variables", "value", "values", "trainable"),
        *("model", "module", "layers", "optimizer", "opt", "state", "dict", "raw", "target", "item"),
    )
)
"""Words that say nothing about which leaf it is."""

SYNONYMS = {
    "w": "kernel",
    "weight": "kernel",
    "embeddings": "kernel",
    "embedding": "kernel",
    "depthwise": "kernel",
    "b": "bias",
    "beta": "bias",
    "gamma": "scale",
    "moving": "running",
    "variance": "var",
}


def canonical(name: str) -> tuple[str, ...]:
    """The words of a name that tell its leaf from others.

    Words are cut at separators, at changes of case and between letters and digits; wrappers are dropped, synonyms
    unified.

    >>> canonical("params/Dense_0/kernel") == canonical("model.layers.dense.0.weight")
    True
    """
    spaced = re.sub(r"([a-z])([A-Z])", r"\1 \2", name)
    words: list[str] = re.findall(r"[a-z]+|\d+", spaced.lower())
    return tuple(SYNONYMS.get(word, word) for word in words if word not in WRAPPERS)
