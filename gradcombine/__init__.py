"""Combines gradients over lists, over time and over replicas, with one algebra in NumPy, JAX and TensorFlow."""

from gradcombine import losses as losses
from gradcombine import noise as noise
from gradcombine import reductions as reductions
from gradcombine import replicated as replicated
from gradcombine import statefile as statefile
from gradcombine import wires as wires
from gradcombine.digests import digest
from gradcombine.errors import GradCombineError
from gradcombine.places.lists import add_n, combine, mean, tree_sum
from gradcombine.places.replicas import LOCAL, all_reduce, jax_axis, merge_replicas, tf_replicas
from gradcombine.places.time import Accumulator, accumulate, check_state
from gradcombine.reductions.algebra import Reduction
from gradcombine.resilience import faults as faults
from gradcombine.resilience import ledger as ledger
from gradcombine.settings import UNTIL_FLUSH
from gradcombine.types import AccumulateState

__version__ = "0.1.0"

__all__ = [
    "LOCAL",
    "UNTIL_FLUSH",
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
    "jax_axis",
    "mean",
    "merge_replicas",
    "tf_replicas",
    "tree_sum",
]
