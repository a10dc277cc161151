"""Combines gradients over lists, over time and over replicas, with one algebra in NumPy, JAX and TensorFlow."""

from gradcombine import losses, noise, reductions, replicated, statefile, wires
from gradcombine.digests import digest
from gradcombine.errors import GradCombineError
from gradcombine.places.lists import add_n, combine, mean, tree_sum
from gradcombine.places.replicas import LOCAL, all_reduce, jax_axis, merge_replicas, tf_replicas
from gradcombine.places.time import Accumulator, accumulate, check_state
from gradcombine.reductions.algebra import Reduction
from gradcombine.resilience import faults, ledger
from gradcombine.types import AccumulateState

__version__ = "0.1.0"

__all__ = [
    "LOCAL",
    "AccumulateState",
    "Accumulator",
    "GradCombineError",
    "Reduction",
    "accumulate",
    "add_n",
    "all_reduce",
    "check_state",
    "combine",
    "digest",
    "faults",
    "jax_axis",
    "ledger",
    "losses",
    "mean",
    "merge_replicas",
    "noise",
    "reductions",
    "replicated",
    "statefile",
    "tf_replicas",
    "tree_sum",
    "wires",
]
