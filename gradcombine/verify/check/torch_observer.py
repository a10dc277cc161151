# pyright: standard
"""Observes the operations of a PyTorch step, widens them, and rounds its additions of gradients."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch.optim.optimizer import register_optimizer_step_pre_hook  # pyright: ignore[reportMissingImports]
from torch.utils._python_dispatch import TorchDispatchMode  # pyright: ignore[reportMissingImports]

from gradcombine import tree
from gradcombine.types import Tree
from gradcombine.verify.check.leaves import flattened, is_float_dtype, widened
from gradcombine.verify.check.running import NotFiniteError, NotWide, Result, Split, Subject
from gradcombine.verify.diff.pytorch import converted

OPTIMIZER, CLIPPING = "optimizer", "clipping"
"""Points at which gradients are observed: when an optimizer receives them, and when they are clipped."""

Settings: TypeAlias = list[dict[str, Any]]
"""Numbers in each group of an optimizer, by name."""

WIDE = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64)
WIDE |= dict.fromkeys((torch.complex32, torch.complex64), torch.complex128)
PRODUCTS = re.compile(r"mm\.|mv\.|dot|convolution|rnn|lstm|gru")
CLIPS = re.compile(r"norm|clamp")
"""Operations that clip gradients or compute their norm."""


class Observer(TorchDispatchMode):
    """Observes the operations of a step, and runs them in float64 if `wide` is set.

    Args:
      point: where gradients are observed; empty: nowhere.
      replacements: gradients to write there instead, by parameter name.
      clips_once: whether to undo clipping before gradients are added to, so that only the sum is clipped.
      settings: settings to write to the optimizers' groups before each step, in the order of the steps.

    Attributes:
      wide: whether to run operations in float64, except those that draw random numbers.
      names: names of the parameters.
      products: dtypes of the operands of matrix products.
      drawn: dtypes of random numbers.
      updates: number of optimizer steps.
      settings: numbers in the groups of the optimizers, such as learning rates, at each step.
      gradients: the last gradients at the point, by parameter name; at clipping, before the first operation after
        their accumulation.
      received: the last gradients that optimizers received, by parameter name.
    """

    def __init__(
        self,
        point: str = "",
        replacements: Mapping[str, np.ndarray] | None = None,
        clips_once: bool = False,
        settings: Sequence[Settings] = (),
    ) -> None:
        super().__init__()
        self.wide, self.names = False, dict[Any, str]()
        self.products, self.drawn = set[Any](), set[Any]()
        self.gradients, self.received = dict[str, np.ndarray](), dict[str, np.ndarray]()
        self._point, self._replacements, self.updates = point, replacements, 0
        self._clipped, self._unclipped = dict[Any, Any](), dict[Any, Any]()
        self._clips_once, self._watches = clips_once, clips_once or point == CLIPPING
        self.settings, self._imposed = list[Settings](), iter(settings)

    def watch(self, params: Iterable[Any]) -> None:
        """Observes when gradients are accumulated, to find the first operation of clipping after that."""

        def on_accumulated(p: Any) -> None:
            self._clipped.pop(p, None)

        def before_accumulated(p: Any) -> None:
            if p.grad is not None and self._clipped.get(p) is p.grad:
                p.grad.copy_(self._unclipped[p])

        for p in params if self._watches else ():
            if p.is_leaf and p.requires_grad:
                p.register_post_accumulate_grad_hook(on_accumulated)
                if self._clips_once:
                    p.register_hook(lambda _, p=p: before_accumulated(p))

    @contextmanager
    def before_optimizer_steps(self) -> Iterator[None]:
        """Context in which `_on_optimizer_step` runs before each optimizer step, after the optimizer's own hooks."""
        last = dict[Any, Any]()

        def first(optimizer: Any, args: Any, kwargs: Any) -> None:
            if optimizer in last:
                last[optimizer].remove()
            last[optimizer] = optimizer.register_step_pre_hook(self._on_optimizer_step)

        try:
            with register_optimizer_step_pre_hook(first):
                yield
        finally:
            for handle in last.values():
                handle.remove()

    def _on_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Returns the arguments of an optimizer step if a closure computes the gradients."""
        self.updates += 1
        groups = optimizer.param_groups
        for group, imposed in zip(groups, next(self._imposed, ()), strict=False):
            group.update(imposed)
        self.settings.append([{name: x for name, x in group.items() if _is_setting(x)} for group in groups])
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._on_gradients(optimizer)
            return None

        def observed() -> Any:
            loss = closure()
            self._on_gradients(optimizer)
            return loss

        return args[:1], kwargs | {"closure": observed}

    def _on_gradients(self, optimizer: Any) -> None:
        params = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
        for p in params if self._point else ():
            name = self.names.setdefault(p, str(len(self.names)))
            if self._point == OPTIMIZER:
                self._visit(name, p.grad)
            self.received[name] = self.gradients[name] if self._point == OPTIMIZER else arrays_of(dense(p.grad))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        draws = torch.Tag.nondeterministic_seeded in func.tags and _value(func, "dropout_p", args, kwargs) != 0
        if not self.wide or self._point:
            self._record(str(func), [x for x in tensors_in((args, kwargs)) if x.is_floating_point()], draws)
        if not self.wide:
            return func(*args, **kwargs)
        mutated = 1 if func._schema.is_mutable else 0
        if draws:  # the same numbers as in float32
            result = func(*each(_narrow, args), **each(_narrow, kwargs))
            return args[0].copy_(result) if mutated else each(to_wide, result)
        if "_amp_" in func.__name__:  # gradient scaling requires float32
            narrow = [_narrow(x) if isinstance(x, torch.Tensor) else x for x in args]
            result = func(*narrow, **kwargs)
            for x, y in zip(tensors_in(args[:2]), tensors_in(narrow[:2]), strict=True):
                x.copy_(y)
            return result
        if any(x.dtype in WIDE for x in tensors_in(args[:mutated])):
            raise NotWide(f"{func} changes a tensor narrower than float64 in place")
        result = func(*args[:mutated], *each(to_wide, args[mutated:]), **each(to_wide, kwargs))
        return result if mutated else each(to_wide, result)

    def _record(self, name: str, floats: Sequence[Any], draws: bool) -> None:
        if draws:
            self.drawn.update([x.dtype for x in floats] or [torch.float32])
        if PRODUCTS.search(name):
            self.products.update(x.dtype for x in floats)
        if self._watches and CLIPS.search(name):
            named = {p: name for p, name in self.names.items() if p.grad is not None and p.grad is dense(p.grad)}
            gradients = {p.grad.data_ptr(): (p, name) for p, name in named.items()}
            for pointer in {x.data_ptr() for x in floats} & set(gradients):
                p, name = gradients[pointer]
                if self._clipped.get(p) is not p.grad:
                    self._clipped[p] = p.grad
                    if self._clips_once:
                        self._unclipped[p] = p.grad.clone()
                    else:
                        self._visit(name, p.grad)

    def _visit(self, name: str, gradient: Any) -> None:
        if self._replacements is not None:
            if gradient is not dense(gradient):
                raise NotWide("a sparse gradient is not replaced")
            gradient.copy_(tensor_of(self._replacements[name], gradient))
        self.gradients[name] = arrays_of(dense(gradient))


def tensors_of(x: Any) -> dict[str, Any]:
    """Returns a tensor, or the parameters and buffers of a module, by name."""
    if not isinstance(x, torch.nn.Module):
        return {"": x} if isinstance(x, torch.Tensor) else {}
    return dict([*x.named_parameters(), *x.named_buffers()])


def arrays_of(value: Tree) -> Tree:
    """Converts tensors to NumPy arrays, and modules and schedules to dicts of arrays; other objects become None."""
    leaves, structure = flattened(value)
    arrays = [None if isinstance(x, OPAQUE) else converted(_contents(x)) for x in leaves]
    return tree.unflatten(structure, arrays)


OPAQUE = torch.optim.Optimizer, torch.amp.GradScaler
"""Objects whose state is not compared."""


def _contents(x: Any) -> Any:
    """Returns the tensors of a module or the number of steps that a schedule made, as a dict, or another object."""
    if isinstance(x, torch.optim.lr_scheduler.LRScheduler):
        first = x._schedulers[0] if isinstance(x, torch.optim.lr_scheduler.ChainedScheduler) else x
        return {"steps": np.array(first.last_epoch)}
    return tensors_of(x) if isinstance(x, torch.nn.Module) else x


def dense(gradient: Any) -> Any:
    """Converts a sparse gradient, as of an embedding, to a dense tensor."""
    return gradient.to_dense() if getattr(gradient, "layout", None) is torch.sparse_coo else gradient


def tensor_of(array: np.ndarray, like: Any) -> Any:
    """Converts an array to a tensor, float64 if the array is, else in the dtype of ``like``, on its device."""
    dtype = {np.dtype(x): y for x, y in ((np.float64, torch.float64), (np.complex128, torch.complex128))}
    values = widened(array) if is_float_dtype(array.dtype) else array
    return torch.tensor(values, dtype=dtype.get(array.dtype, like.dtype), device=like.device)


def _is_setting(x: Any) -> bool:
    """Whether a value of an optimizer's group is a number or several, as of betas."""
    return all(isinstance(y, int | float) for y in (x if isinstance(x, tuple) else (x,)))


def _value(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the value of an argument of an operation; None if it has none of this name."""
    arguments = func._schema.arguments
    index = next((i for i, x in enumerate(arguments) if x.name == name), None)
    if index is None or index < len(args):
        return None if index is None else args[index]
    return kwargs.get(name, arguments[index].default_value)


def tensors_in(x: Any) -> Iterator[Any]:
    """Yields the tensors among the arguments of an operation."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (list, tuple, dict)):
        for item in x.values() if isinstance(x, dict) else x:
            yield from tensors_in(item)


def each(change: Callable[[Any], Any], x: Any) -> Any:
    """Applies ``change`` to the arguments or results of an operation; faster than functions on general trees."""
    if isinstance(x, dict):
        return {name: each(change, item) for name, item in x.items()}
    return type(x)([each(change, item) for item in x]) if type(x) in (list, tuple) else change(x)


def to_wide(x: Any) -> Any:
    """Converts a tensor or a dtype to float64 or complex128."""
    if isinstance(x, torch.Tensor):
        return x.to(WIDE[x.dtype]) if x.dtype in WIDE else x
    return WIDE.get(x, x) if isinstance(x, torch.dtype) else x


def _narrow(x: Any) -> Any:
    return x.float() if isinstance(x, torch.Tensor) and x.dtype == torch.float64 else x


# --- additions in a narrow dtype ---

_EACH = "add", "sub", "lerp", "addcmul", "addcdiv"
_NAMES = *_EACH, *(f"_foreach_{name}" for name in _EACH), "index_add", "scatter_add"
SUMS = {f"{name}{suffix}" for name in _NAMES for suffix in ("", "_")}
SUMS |= {f"{name}_" for name in ("addmm", "addmv", "addr", "addbmm", "baddbmm")}  # layers call those that return
NARROW = torch.float16, torch.bfloat16


class Sums(Observer):
    """Observes additions that are not part of a derivative or of a function that is differentiated.

    Args:
      dtypes: of their results in the step's own precision, to which their terms are rounded in a float64 run.
      rounds: whether to round the results, too.

    Attributes:
      dtypes: of the results, in the order of the additions.
    """

    def __init__(self, dtypes: Sequence[Any] = (), rounds: bool = False) -> None:
        super().__init__(OPTIMIZER)
        self.dtypes, self._rounded, self._rounds = list[Any](), iter(dtypes), rounds
        self._sums = dict[int, Any]()  # by address; references keep it from being used again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._adds_gradients(func, args):
            return super().__torch_dispatch__(func, types, args, kwargs)
        dtypes = next(self._rounded, [])
        if self.wide and any(x in NARROW for x in dtypes):
            first = 1 if func._schema.is_mutable else 0
            args = *args[:first], *each(lambda x: self._as_term(x, dtypes[0]), args[first:])
        result = super().__torch_dispatch__(func, types, args, kwargs)
        results = [*tensors_in(args[0] if result is None else result)]
        if not self.wide:
            self.dtypes.append([x.dtype for x in results])
            return result
        for x, dtype in zip(results, dtypes, strict=False):
            if dtype in NARROW:
                self._sums[x.data_ptr()] = x
                if self._rounds:
                    x.copy_(x.to(dtype))
        return result

    def _adds_gradients(self, func: Any, args: Any) -> bool:
        if func.overloadpacket.__name__ not in SUMS or any(x.requires_grad for x in tensors_in(args[1:])):
            return False
        if torch._C._current_graph_task_id() == -1:
            return not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors_in(args[:1])))
        gradients = {p.grad.data_ptr() for p in self.names if p.grad is not None}
        return any(x.data_ptr() in gradients for x in tensors_in(args[:1]))  # backward adds to what is there

    def _as_term(self, x: Any, dtype: Any) -> Any:
        """Rounds a tensor unless it is a sum."""
        is_term = isinstance(x, torch.Tensor) and x.data_ptr() not in self._sums
        return x.to(dtype).to(x.dtype) if is_term and x.is_floating_point() else x


def rounded_sums(subject: Subject, split: Split) -> tuple[str, list[Result]]:
    """Returns the dtype and results of narrow additions, as `step_program.rounded_sums` does."""
    step: Any = subject.step(split)
    observer, results = Sums(), list[Result]()
    subject.call(lambda params, batch: step(params, batch, observer), subject.batch, wide=False)
    narrow = [x for dtypes in observer.dtypes for x in dtypes if x in NARROW]
    if not narrow:
        return "", []
    with suppress(NotWide, NotFiniteError):
        for rounds in (False, True):
            observers = Sums(observer.dtypes, rounds)
            rounded = subject.run(split, subject.batch, True, lambda params, batch, x=observers: step(params, batch, x))
            results.append(rounded)
    return str(narrow[0]).removeprefix("torch."), results
