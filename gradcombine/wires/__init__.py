"""Narrow exchanges between replicas: sums encoded in few bits, added in float32, and gathered as narrow again.

``reductions.mean(wire=wires.cast("bfloat16"))`` sends half of the bytes over replicas, wherever that reduction runs. A
narrow all-reduce rounds at each of its N - 1 hops; here every sum is rounded twice, whatever N is.
"""

from gradcombine.wires.exchange import bytes_sent
from gradcombine.wires.wire import Wire as Wire
from gradcombine.wires.wire import blocks, cast

__all__ = ["blocks", "bytes_sent", "cast"]
