"""State files, which any framework can load, on the same or another number of replicas."""

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
