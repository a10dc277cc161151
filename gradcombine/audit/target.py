# pyright: standard
"""Hardware that programs are compiled for, attached or not, and its published figures."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from gradcombine.audit.subject import Exchange, X
from gradcombine.errors import importing, invalid, operation, require_path, shown

H100 = Path(__file__).with_name("h100.textproto")
"""A GpuTargetConfigProto of an H100 SXM."""


class Published(NamedTuple):
    """Published figures of one device.

    Attributes:
      flops: peak operations per second, by the bit width of the operands.
      bandwidth: of its memory, in bytes per second.
      memory: in bytes.
      link: bytes per second that it sends to devices of its host or slice; None if unpublished.
      network: bytes per second that it sends to other hosts; None if unpublished.
    """

    flops: dict[int, float]
    bandwidth: float
    memory: int
    link: float | None = None
    network: float | None = None


GIB = 2**30
PUBLISHED = {
    # NVIDIA H100 Tensor Core GPU, data sheet of the SXM: dense rates; NVLink is 900 GB/s in both directions, and a
    # DGX H100 has a card of 400 Gb/s for each GPU.
    "h100": Published({8: 1979e12, 16: 989.4e12, 32: 494.7e12, 64: 66.9e12}, 3.35e12, 84942979072, 450e9, 50e9),
    # Google Cloud's pages of the TPU versions: ICI is given for both directions together.
    "v4": Published({8: 275e12, 16: 275e12, 32: 275e12}, 1228e9, 32 * GIB, 150e9),
    "v5e": Published({8: 393e12, 16: 197e12, 32: 197e12}, 819e9, 16 * GIB, 200e9),
    "v5p": Published({8: 918e12, 16: 459e12, 32: 459e12}, 2765e9, 95 * GIB, 600e9),
    "v6e": Published({8: 1836e12, 16: 918e12, 32: 918e12}, 1640e9, 32 * GIB, 400e9),
}
"""Published figures by device. By default a TPU multiplies float32 as bfloat16, so that rate applies to both."""

KINDS = {
    "NVIDIA H100 80GB HBM3": "h100",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
}
"""Keys of `PUBLISHED` by JAX's ``device_kind``."""


LENGTH = r"[1-9]\d{0,4}"
"""Pattern of a slice dimension, or a number of hosts or devices, in the name of a target."""


HERE = "this machine"


class Target(NamedTuple):
    """Devices to compile for.

    Attributes:
      name: as passed to `find_target`.
      devices: devices of JAX; for this machine, `jax.devices`.
      per_host: number of devices that share a host or slice.
      figures: published figures of a device, or None.
      order: for each device of a program, its position in ``devices``; empty if they are in order.
    """

    name: str
    devices: tuple[Any, ...]
    per_host: int
    figures: Published | None
    order: tuple[int, ...] = ()

    def host(self, device: int) -> int:
        """The host or slice of a device of the program."""
        return (self.order[device] if self.order else device) // self.per_host

    @property
    def here(self) -> bool:
        return self.name == HERE


@operation("audit")
def find_target(name: str | Target | None = None, *, compiles: bool = True) -> Target:
    """Finds the hardware of this name.

    Args:
      name: "h100:8" (one host), "h100:64x8" (hosts by devices), "v5e:16x16" (chips of a slice), or the path of a
        GpuTargetConfigProto in text form followed by ":" and the number of devices, or hosts x devices. None: this
        machine. A `Target` is returned unchanged.
      compiles: whether to load the compiler; otherwise the target has figures, but no devices.

    Raises:
      GradCombineError: for an unknown name, and if the compiler is not installed.
    """
    if isinstance(name, Target):
        return name
    if name is None:
        if not compiles:
            return Target("an unknown machine", (), 1, None)
        with importing("audit"):
            import jax

        devices = tuple(jax.devices())
        figures = PUBLISHED.get(KINDS.get(devices[0].device_kind, ""))
        # NVLink connects the GPUs of a host; all TPUs that JAX reports form one slice.
        per_host = len(jax.local_devices()) if devices[0].platform == "gpu" else len(devices)
        return Target(HERE, devices, per_host, figures)
    kind, _, shape = name.rpartition(":") if isinstance(name, str) else ("", "", "")
    if kind in PUBLISHED and kind != "h100":
        if not re.fullmatch(rf"{LENGTH}x{LENGTH}(x{LENGTH})?", shape):
            raise invalid(f"a slice such as {kind}:4x4", name)
        chips = math.prod(int(n) for n in shape.split("x"))
        return Target(name, tpu(name) if compiles else (), chips, PUBLISHED[kind])
    hosts, _, per_host = shape.rpartition("x")
    expected = "a target: h100:8, h100:64x8, v5e:16x16, v5p:8x8x8, or the file of a card's description and :8"
    card = H100 if kind == "h100" else require_path(expected, kind)
    if not re.fullmatch(rf"({LENGTH}x)?{LENGTH}", shape) or not card.is_file():
        raise invalid(expected, shown(name))
    try:
        text = card.read_text()
    except (OSError, ValueError) as error:  # unreadable, or not text
        raise invalid("a GpuTargetConfigProto in text form", f"{card}: {error}") from None
    figures = PUBLISHED.get(kind) or described(text)
    return Target(name, gpu(text, int(per_host), int(hosts or 1)) if compiles else (), int(per_host), figures)


@cache
def gpu(description: str, devices: int = 1, hosts: int = 1) -> tuple[Any, ...]:
    """GPU devices for a GpuTargetConfigProto, with ``devices`` GPUs per host."""
    _require("jax_plugins.xla_cuda12", "--no-deps jax-cuda12-plugin=={0} jax-cuda12-pjrt=={0}")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # compiling does not need the CUDA libraries
    shape = f"1x{hosts}x{devices}"
    return _topology("cuda", topology_name="gpu", target_config=description, topology=shape)


@cache
def tpu(name: str) -> tuple[Any, ...]:
    """TPU devices of a slice, for instance ``"v5e:4x4"``."""
    _require("libtpu", "'jax[tpu]=={0}'")
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # there is no cloud metadata server to query
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # compiling needs no TPU, so processes need no lock for it
    return _topology("tpu", topology_name=name)


def described(text: str) -> Published:
    """The figures in a GpuTargetConfigProto, which lacks the rates of tensor cores and links.

    >>> described(H100.read_text()).bandwidth
    3352320000000.0
    """
    fields = {name: float(number) for name, number in re.findall(r"(\w+): (\d+(?:\.\d*)?)$", text, re.MULTILINE)}
    required = ("memory_bandwidth", "device_memory_size")
    if missing := [name for name in required if not 0 < fields.get(name, 0) < math.inf]:
        raise invalid(f"a GpuTargetConfigProto with {', '.join(missing)}", "none of these")
    bandwidth, memory = (fields[name] for name in required)
    return Published({}, bandwidth, int(memory))


def _require(module: str, packages: str) -> None:
    with importing("audit"):
        import jax

    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        command = f"pip install {packages.format(jax.__version__)}"
        raise invalid(f"the compiler of this target, in a separate environment: {command}", "none installed")


def _topology(platform: str, **names: str) -> tuple[Any, ...]:
    from jax.experimental import topologies

    try:
        return tuple(topologies.get_topology_desc(platform=platform, **names).devices)
    except Exception as error:  # the exception classes of compilers are private
        reason = " ".join(str(error).split())[:200]
        # Without JAX_PLATFORMS=cpu, JAX does not register a plugin that finds no CUDA at start-up.
        hint = ", with JAX_PLATFORMS=cpu set before JAX begins" * isinstance(error, NotImplementedError)
        raise invalid(f"a target that its compiler knows{hint}", reason) from None


class Bound(NamedTuple):
    """A lower bound of execution time.

    Attributes:
      seconds: work divided by the peak rate; None if the rate is unpublished.
      arithmetic: the calculation as text.
    """

    seconds: float | None
    arithmetic: str


def bounds(target: Target, flops: dict[int, float], moved: float, exchanges: Sequence[Exchange[X]]) -> dict[str, Bound]:
    """Lower bounds of the times of compute, memory and exchange, by the target's published figures.

    Args:
      target: with figures.
      flops: of matrix products and convolutions, by the bit width of their type.
      moved: bytes in main memory.
      exchanges: each counts once per iteration of its loops.
    """
    figures = target.figures
    if figures is None:
        unknown = Bound(None, f"no rates are published for {target.name}")
        return dict.fromkeys(("compute", "memory", "exchange"), unknown)
    seconds = moved / figures.bandwidth
    memory = Bound(seconds, f"{moved:,.0f} B / {figures.bandwidth:.4g} B/s = {seconds:.3g} s")
    exchange = _exchange(exchanges, target, figures)
    return {"compute": _compute(flops, figures), "memory": memory, "exchange": exchange}


def _compute(flops: dict[int, float], figures: Published) -> Bound:
    if not figures.flops:
        return Bound(None, "no rate of products is published")
    fastest = max(figures.flops.values())
    parts = [(count, width, figures.flops.get(width, fastest)) for width, count in sorted(flops.items())]
    words = " + ".join(f"{count:.3g} of {width} bits / {rate:.4g}/s" for count, width, rate in parts) or "no products"
    seconds = sum(count / rate for count, _, rate in parts)
    return Bound(seconds, f"{words} = {seconds:.3g} s")


def _exchange(exchanges: Sequence[Exchange[X]], target: Target, figures: Published) -> Bound:
    within = across = 0.0
    for x in exchanges:
        hosts, away = x.leaves_host(target.host)
        across += x.times * away
        within += x.times * (x.sent() if hosts == 1 else max(0.0, x.sent() - away))
    words, seconds = list[str](), 0.0
    for sent, rate, where in ((within, figures.link, "to its host"), (across, figures.network, "to other hosts")):
        if sent and rate is None:
            return Bound(None, f"{sent:,.0f} B {where}, of which no rate is published")
        if sent and rate is not None:
            seconds = max(seconds, sent / rate)
            words.append(f"{sent:,.0f} B {where} / {rate:.4g} B/s")
    joined = f"max({', '.join(words)})" if len(words) > 1 else "".join(words)
    return Bound(seconds, f"{joined} = {seconds:.3g} s" if words else "nothing is exchanged")
