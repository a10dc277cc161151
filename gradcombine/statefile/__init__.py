"""States in files: saved by one framework and loaded by another, on the same number of replicas or on another one."""

from gradcombine.statefile.files import inspect, load, load_replicas, save, save_replicas
from gradcombine.statefile.header import Header as Header
from gradcombine.statefile.recovery import Recovered as Recovered
from gradcombine.statefile.recovery import begin_window, recover, save_part
from gradcombine.statefile.resize import resize

__all__ = [
    "begin_window",
    "inspect",
    "load",
    "load_replicas",
    "recover",
    "resize",
    "save",
    "save_part",
    "save_replicas",
]
