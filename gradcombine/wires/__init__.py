"""Low-precision all-reduce: replicas send narrow encodings, add them in float32, and gather narrow sums.

``reductions.mean(wire=wires.cast("bfloat16"))`` halves the bytes sent between replicas. An all-reduce in a narrow dtype
rounds at each of its N - 1 hops; this one rounds at most twice, for any N.
"""

from gradcombine.wires.exchange import bytes_sent
from gradcombine.wires.wire import Wire as Wire
from gradcombine.wires.wire import blocks, cast

__all__ = ["blocks", "bytes_sent", "cast"]
