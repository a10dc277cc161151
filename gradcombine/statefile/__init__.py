"""States in files: saved by one framework and loaded by another, on the same number of replicas or on another one."""

from gradcombine.statefile.files import inspect, load, load_replicas, save, save_replicas
from gradcombine.statefile.header import Header, Leaf
from gradcombine.statefile.resize import resize

__all__ = [
    "Header",
    "Leaf",
    "inspect",
    "load",
    "load_replicas",
    "resize",
    "save",
    "save_replicas",
]
