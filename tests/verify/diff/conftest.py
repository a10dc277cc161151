"""Parameters of one small model, saved by each framework."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorflow as tf
from safetensors.numpy import save_file

Arrays = dict[str, Any]


def parameters() -> Arrays:
    """Two layers as a nested dict of NumPy arrays; square and oblong kernels, and two biases of one shape."""
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    return {
        "dense_0": {"kernel": normal(5, 4), "bias": normal(4)},
        "dense_1": {"kernel": normal(4, 4), "bias": normal(4)},
        "scale": np.array(0.5, np.float32),
    }


def flat(tree: Arrays, separator: str = "/") -> Arrays:
    found = {}
    for name, value in tree.items():
        inner = flat(value, separator) if isinstance(value, dict) else {"": value}
        found |= {f"{name}{separator}{key}".removesuffix(separator): array for key, array in inner.items()}
    return found


def mapped(convert: Callable[[Any], Any], tree: Arrays) -> Arrays:
    return {name: mapped(convert, x) if isinstance(x, dict) else convert(x) for name, x in tree.items()}


def npz(path: Path, tree: Arrays) -> Path:
    np.savez(path / "dump.npz", **flat(tree))
    return path / "dump.npz"


def compressed(path: Path, tree: Arrays) -> Path:
    np.savez_compressed(path / "small.npz", **flat(tree))
    return path / "small.npz"


def safetensors(path: Path, tree: Arrays) -> Path:
    save_file({name: np.array(x, order="C") for name, x in flat(tree).items()}, path / "dump.safetensors")
    return path / "dump.safetensors"


def orbax(path: Path, tree: Arrays) -> Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.resolve() / "orbax", {"params": mapped(jnp.asarray, tree)})
    return path / "orbax"


def tensorflow(path: Path, tree: Arrays) -> Path:
    return Path(tf.train.Checkpoint(**mapped(tf.Variable, tree)).write(str(path / "checkpoint")))


WRITERS: dict[str, Callable[[Path, Arrays], Path]] = {
    "npz": npz,
    "compressed": compressed,
    "safetensors": safetensors,
    "orbax": orbax,
    "tensorflow": tensorflow,
}


@pytest.fixture(params=WRITERS)
def write(request: pytest.FixtureRequest) -> Callable[[Path, Arrays], Path]:
    return WRITERS[request.param]


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
