# pyright: standard
"""Adapts PyTorch steps to NumPy arrays. Imported only if the user's program has imported torch.

A step gets copies of its modules, optimizers and tensors with the values of the arrays, and draws the same random
numbers in each run. In float64, make_step is called again, and every operation runs in float64 regardless of its dtype.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch.optim.optimizer import register_optimizer_step_pre_hook  # pyright: ignore[reportMissingImports]
from torch.utils._python_dispatch import TorchDispatchMode  # pyright: ignore[reportMissingImports]

from gradcombine import tree
from gradcombine.errors import GradCombineError
from gradcombine.types import Tree
from gradcombine.verify.check.case import Case, accounts_for
from gradcombine.verify.check.inner import HIDDEN, are_far
from gradcombine.verify.check.leaves import ZERO, flattened, is_float_dtype, is_torch, widened
from gradcombine.verify.check.measure import Measured
from gradcombine.verify.check.running import ONE_BATCH, NotFiniteError, NotWide, Split, Step, Subject
from gradcombine.verify.check.standard import Standard
from gradcombine.verify.diff.pytorch import converted

OPTIMIZER, CLIPPING = "optimizer", "clipping"
"""Points at which gradients are observed: when an optimizer receives them, and when they are clipped."""

Optimized = list[dict[str, np.ndarray]]
"""Zeros for the parameters that optimizers received in the first run of any step; empty before it."""

OBSERVED = "['gradients']['"
"""Is in the paths of these gradients in a result, before the name of the parameter."""

WIDE = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64)
WIDE |= dict.fromkeys((torch.complex32, torch.complex64), torch.complex128)
PRODUCTS = re.compile(r"mm\.|mv\.|dot|convolution|rnn|lstm|gru")
CLIPS = re.compile(r"norm|clamp")
"""Operations that clip gradients or compute their norm."""


def as_arrays(
    make_step: Callable[..., Step], params: Tree, batch: Tree, settings: Mapping[str, Any]
) -> tuple[Callable[..., Step], Tree, Tree, dict[str, Any]]:
    """Converts the arguments of a check to NumPy if the parameters or the batch contain PyTorch objects."""
    settings = dict(settings)
    if not any(is_torch(x) for x in [*flattened(params)[0], *flattened(batch)[0]]):
        return make_step, params, batch, settings
    for name, arguments in (("terms", (params, batch)), ("reference", (params, batch)), ("pad", (batch, 0))):
        value = settings.get(name)
        settings[name] = TorchStep(lambda value=value: value, *arguments) if callable(value) else _arrays(value)
    steps = TorchSteps(make_step, params, batch, settings["returns"])
    return steps, _arrays(params), _arrays(batch), settings


class TorchSteps:
    """Factory of steps of NumPy arrays.

    Args:
      make_step: ``make_step(microbatches)``, or ``make_step(microbatches, devices=...)``.
      params, batch: example arguments of the steps.
      returns: "gradients": a step that returns nothing leaves its result in ``.grad`` of the parameters. "params": the
        gradients that optimizers receive are appended to the result, because Adam's first step hides their scale.
    """

    framework = "torch"

    def __init__(self, make_step: Callable[..., Step], params: Tree, batch: Tree, returns: str) -> None:
        self._make_step, self._point = make_step, ""
        self._arguments = params, batch, returns, list[dict[str, np.ndarray]](), list[Any]()
        self.takes_optimizer = any(isinstance(x, torch.optim.Optimizer) for x in flattened(params)[0])

    def __call__(self, microbatches: int, **devices: int) -> Any:
        step = TorchStep(partial(self._make_step, microbatches, **devices), *self._arguments)
        return step.up_to(self._point) if self._point else step

    def up_to(self, point: str) -> TorchSteps:
        """Returns a factory of steps that return the gradients at a point."""
        other = copy.copy(self)
        other._point = point
        return other


class TorchStep:
    """A function of parameters and batch on NumPy arrays; ``make`` is called once for each precision."""

    def __init__(
        self,
        make: Callable[[], Step],
        params: Tree,
        batch: Tree,
        returns: str = "",
        optimized: Optimized | None = None,
        first: list[Any] | None = None,
    ) -> None:
        self._make, self._returns, self._optimized = make, returns, [] if optimized is None else optimized
        self._first, self._left = [] if first is None else first, list[dict[str, Any]]()
        self._like = flattened(params), flattened(batch)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self._steps = {False: make()}

    def __call__(self, params: Tree, batch: Tree, observer: Observer | None = None, again: bool = False) -> Tree:
        values, structure = tree.split_as(self._like[0][1], params), self._like[0][1]
        leaves, batch, wide = self._arguments(values, batch)
        observed = observer or Observer(OPTIMIZER)
        observed.wide, tensors = wide, [_tensors(x) for x in leaves]
        for path, named in zip(structure.paths(), tensors, strict=True):
            observed.names |= {p: _short(f"{path}[{name!r}]" if name else path) for name, p in named.items()}
        for named, left in zip(tensors, self._left if again else (), strict=again):
            for name, p in named.items():
                p.grad = left[name]
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng())
            stack.enter_context(register_optimizer_step_pre_hook(observed.on_optimizer_step))
            if wide or observer is not None:  # compiled modules do not support a dispatch mode
                stack.enter_context(observed)
                observed.watch(p for named in tensors for p in named.values())
            torch.manual_seed(0)
            step = self._steps.get(wide) or self._steps.setdefault(wide, self._make())
            torch.manual_seed(0)
            result = step(tree.unflatten(structure, leaves), batch)
        self._left = [{name: p.grad for name, p in named.items()} for named in tensors]
        for x, arrays in zip(leaves, values, strict=True):
            if isinstance(x, torch.nn.Module):
                arrays.update(_arrays(x))  # a dict of the caller's, which changes in place as the module does
        if not self._optimized:
            self._optimized.append({name: np.zeros_like(x) for name, x in observed.gradients.items()})
        if self._returns == "params" and (zeros := self._optimized[0]):
            # The structure is that of the first run: a gradient scaler may skip a step if gradients are not finite.
            zeros = {name: widened(x) if wide else x for name, x in zeros.items()}
            extra = {"gradients": {name: observed.gradients.get(name, x) for name, x in zeros.items()}}
            result = extra if result is None else (*(result if type(result) is tuple else (result,)), extra)
        elif self._returns == "gradients" and result is None:
            grads = [{name: _dense(p.grad) for name, p in named.items()} for named in tensors]
            result = tree.unflatten(structure, [x.get("", x) for x in grads])
        return self._filled(_arrays(result), wide) if self._returns == "gradients" else _arrays(result)

    def _filled(self, gradients: Tree, wide: bool) -> Tree:
        """Returns zeros in place of gradients that are None, but were not in the first run."""
        leaves, structure = flattened(gradients)
        first = self._first
        if not first:
            first.extend(leaves)
        if len(first) != len(leaves):
            return gradients
        zeros = [None if x is None else np.zeros_like(widened(x) if wide else x) for x in first]
        return tree.unflatten(structure, [x if y is None else y for x, y in zip(zeros, leaves, strict=True)])

    def _arguments(self, params: Sequence[Any], batch: Tree) -> tuple[list[Any], Tree, bool]:
        """Returns copies of the parameters and the batch with these values, and whether the values are wider."""
        values = [*params, *tree.split_as(self._like[1][1], batch)]
        # Copied together, because optimizers hold the parameters of modules.
        like, copies = [*self._like[0][0], *self._like[1][0]], dict[int, Any]()
        leaves = copy.deepcopy(like, copies)
        wide = any([_fill(x, y) for x, y in zip(leaves, values, strict=True)])  # noqa: C419 (each is filled)
        for x, y in zip(like, leaves, strict=True):
            for p, q in zip(_tensors(x).values(), _tensors(y).values(), strict=True):
                _add_attributes(p, q, copies)
        for x in leaves:
            if wide and isinstance(x, torch.optim.Optimizer):
                x.state.update({p: _each(_wide, state) for p, state in x.state.items()})
        arguments = [x if is_torch(x) else y for x, y in zip(leaves, values, strict=True)]
        count = len(params)
        return arguments[:count], tree.unflatten(self._like[1][1], arguments[count:]), wide

    def observe(self, params: Tree, batch: Tree) -> Observer:
        """Runs the step once; returns what was observed."""
        observer = Observer()
        self(params, batch, observer)
        return observer

    def up_to(self, point: str) -> Step:
        """Returns a step that returns the gradients at a point."""

        def step(params: Tree, batch: Tree) -> Tree:
            observer = Observer(point)
            self(params, batch, observer)
            return observer.gradients

        return step

    def again(self, params: Tree, batch: Tree) -> Tree:
        """Runs the step twice from the same parameters; the second run starts with what the first left in ``.grad``."""
        self(copy.deepcopy(params), batch)  # replaces the arrays of modules in place
        return self(params, batch, again=True)

    def after(self, point: str) -> Step:
        """Returns a step of parameters and (batch, gradients) that replaces the gradients at a point."""
        return lambda params, replacement: self(params, replacement[0], Observer(point, replacement[1]))


class Observer(TorchDispatchMode):
    """Observes the operations of a step, and runs them in float64 if `wide` is set.

    Args:
      point: where gradients are observed; empty: nowhere.
      replacements: gradients to write there instead, by parameter name.

    Attributes:
      wide: whether to run operations in float64, except those that draw random numbers.
      names: names of the parameters.
      products: dtypes of the operands of matrix products.
      drawn: dtypes of random numbers.
      updates: number of optimizer steps.
      gradients: the last gradients at the point, by parameter name; at clipping, before the first operation after
        their accumulation.
    """

    def __init__(self, point: str = "", replacements: Mapping[str, np.ndarray] | None = None) -> None:
        super().__init__()
        self.wide, self.names = False, dict[Any, str]()
        self.products, self.drawn, self.gradients = set[Any](), set[Any](), dict[str, np.ndarray]()
        self._point, self._replacements, self.updates = point, replacements, 0
        self._clipped = dict[Any, Any]()

    def watch(self, params: Iterable[Any]) -> None:
        """Observes when gradients are accumulated, to find the first operation of clipping after that."""

        def on_accumulated(p: Any) -> None:
            self._clipped.pop(p, None)

        for p in params if self._point == CLIPPING else ():
            if p.is_leaf and p.requires_grad:
                p.register_post_accumulate_grad_hook(on_accumulated)

    def on_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Hook that runs before each optimizer step; returns its arguments if a closure computes the gradients."""
        self.updates += 1
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
        if self._point == OPTIMIZER:
            for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
                self._visit(self.names.setdefault(p, str(len(self.names))), p.grad)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        draws = torch.Tag.nondeterministic_seeded in func.tags and _value(func, "dropout_p", args, kwargs) != 0
        if not self.wide or self._point:
            self._record(str(func), [x for x in _tensors_in((args, kwargs)) if x.is_floating_point()], draws)
        if not self.wide:
            return func(*args, **kwargs)
        mutated = 1 if func._schema.is_mutable else 0
        if draws:  # the same numbers as in float32
            result = func(*_each(_narrow, args), **_each(_narrow, kwargs))
            return args[0].copy_(result) if mutated else _each(_wide, result)
        if "_amp_" in func.__name__:  # gradient scaling requires float32
            narrow = [_narrow(x) if isinstance(x, torch.Tensor) else x for x in args]
            result = func(*narrow, **kwargs)
            for x, y in zip(_tensors_in(args[:2]), _tensors_in(narrow[:2]), strict=True):
                x.copy_(y)
            return result
        if any(x.dtype in WIDE for x in _tensors_in(args[:mutated])):
            raise NotWide(f"{func} changes a tensor narrower than float64 in place")
        result = func(*args[:mutated], *_each(_wide, args[mutated:]), **_each(_wide, kwargs))
        return result if mutated else _each(_wide, result)

    def _record(self, name: str, floats: Sequence[Any], draws: bool) -> None:
        if draws:
            self.drawn.update([x.dtype for x in floats] or [torch.float32])
        if PRODUCTS.search(name):
            self.products.update(x.dtype for x in floats)
        if self._point == CLIPPING and CLIPS.search(name):
            dense = {p: name for p, name in self.names.items() if p.grad is not None and p.grad is _dense(p.grad)}
            gradients = {p.grad.data_ptr(): (p, name) for p, name in dense.items()}
            for pointer in {x.data_ptr() for x in floats} & set(gradients):
                p, name = gradients[pointer]
                if self._clipped.get(p) is not p.grad:
                    self._clipped[p] = p.grad
                    self._visit(name, p.grad)

    def _visit(self, name: str, gradient: Any) -> None:
        if self._replacements is not None:
            if gradient is not _dense(gradient):
                raise NotWide("a sparse gradient is not replaced")
            gradient.copy_(_tensor(self._replacements[name], gradient))
        self.gradients[name] = _arrays(_dense(gradient))


def before_update(standard: Standard, case: Case) -> Iterator[Standard]:
    """Yields the step up to the gradients at the optimizer or at clipping, if these predict the result."""
    subject = standard.subject
    steps: Any = subject.make_step
    for point in (OPTIMIZER, CLIPPING):
        inner = Subject(steps.up_to(point), subject.params, subject.batch, returns_params=False)
        try:
            one, divided = (inner.call(inner.step(x), subject.batch, case.wide)[0] for x in (ONE_BATCH, case.split))
            if not divided or one.keys() != divided.keys():
                continue
            predicted = subject.run(ONE_BATCH, (subject.batch, divided), case.wide, steps(1).after(point)).floats
            leaves = [i for i, (path, _) in enumerate(subject.param_leaves) if _short(path) in divided]  # no buffers
            if accounts_for(standard, case, predicted, 1, leaves or range(len(subject.param_leaves))):
                yield Standard(inner, standard.unit)
        except (NotWide, NotFiniteError, ValueError):
            continue


def hidden_by_update(standard: Standard, split: Split) -> Iterator[tuple[Standard, bool]]:
    """Yields the step up to clipping if gradients differ there, as `inner.hidden_by_update` does."""
    subject, wide = standard.subject, standard.wide is not None
    steps: Any = subject.make_step
    inner, last = (
        Subject(steps.up_to(x), subject.params, subject.batch, returns_params=False) for x in (CLIPPING, OPTIMIZER)
    )
    try:
        one, divided = (inner.call(inner.step(x), subject.batch, wide)[0] for x in (ONE_BATCH, split))
        at_optimizer = last.call(last.step(ONE_BATCH), subject.batch, wide)[0]
        if not one or not one.keys() == divided.keys() == at_optimizer.keys():
            return
        values, others, last_values = ([x[name] for name in one] for x in (one, divided, at_optimizer))
        noise, threshold = [0.0] * len(values), HIDDEN if wide else max(HIDDEN, 16 * standard.unit)
        standard.gradient_examined |= are_far(values, last_values, noise, threshold)
        if are_far(values, others, noise, threshold):
            yield Standard(inner, standard.unit), False
    except (NotWide, GradCombineError):
        return


def observed(names: Sequence[str]) -> list[int]:
    """Indices of the leaves of a result that are gradients at an optimizer."""
    return [i for i, name in enumerate(names) if OBSERVED in name]


def updates_by_rounding(measured: Measured, sizes: np.ndarray) -> np.ndarray:
    """Bound of each update whose gradient at the optimizer is only rounding, which Adam enlarges; 0 for other leaves.

    Args:
      measured: the step.
      sizes: sizes of the leaves.
    """
    names, leaves = measured.names, observed(measured.names)
    largest = max((sizes[i] for i in leaves), default=0.0)
    zero = {names[i].partition(OBSERVED)[2] for i in leaves if sizes[i] <= ZERO * largest}
    params = [f"{_short(path)}']" in zero for path, _ in measured.subject.param_leaves]
    largest_update = max(sizes[: len(params)], default=0.0)
    return np.array([largest_update * x for x in params] + [0.0] * (len(names) - len(params)))


def _tensors(x: Any) -> dict[str, Any]:
    """Returns a tensor, or the parameters and floating-point buffers of a module, by name."""
    if not isinstance(x, torch.nn.Module):
        return {"": x} if isinstance(x, torch.Tensor) else {}
    buffers = {name: buffer for name, buffer in x.named_buffers() if buffer.is_floating_point()}
    return {**dict(x.named_parameters()), **buffers}


def _arrays(value: Tree) -> Tree:
    """Converts tensors to NumPy arrays, modules to dicts of arrays, and optimizers to None."""
    leaves, structure = flattened(value)
    tensors = [_tensors(x) if isinstance(x, torch.nn.Module) else x for x in leaves]
    return tree.unflatten(structure, [None if isinstance(x, torch.optim.Optimizer) else converted(x) for x in tensors])


def _dense(gradient: Any) -> Any:
    """Converts a sparse gradient, as of an embedding, to a dense tensor."""
    return gradient.to_dense() if getattr(gradient, "layout", None) is torch.sparse_coo else gradient


def _short(path: str) -> str:
    """Formats the path of a leaf like a PyTorch parameter name: ``model.layer.weight``."""
    return path.replace("']['", ".").replace("['", "").replace("']", "")


def _add_attributes(tensor: Any, new: Any, copies: dict[int, Any]) -> None:
    """Adds the attributes and hooks of a tensor to its copy, as copy.deepcopy does not for parameters."""
    vars(new).update(copy.deepcopy(vars(tensor), copies))
    for hook in (tensor._backward_hooks or {}).values():
        new.register_hook(hook)
    for hook in (tensor._post_accumulate_grad_hooks or {}).values():
        new.register_post_accumulate_grad_hook(hook)


def _fill(x: Any, values: Any) -> bool:
    """Writes values into the tensors of a leaf; returns whether this widens them."""
    widens = False
    for name, tensor in _tensors(x).items():
        new = _tensor(values[name] if name else values, tensor)
        widens |= new.dtype != tensor.dtype
        tensor.data = new
    return widens


def _tensor(array: np.ndarray, like: Any) -> Any:
    """Converts an array to a tensor, float64 if the array is, else in the dtype of ``like``, on its device."""
    dtype = {np.dtype(x): y for x, y in ((np.float64, torch.float64), (np.complex128, torch.complex128))}
    values = widened(array) if is_float_dtype(array.dtype) else array
    return torch.tensor(values, dtype=dtype.get(array.dtype, like.dtype), device=like.device)


def _value(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns the value of an argument of an operation; None if it has none of this name."""
    arguments = func._schema.arguments
    index = next((i for i, x in enumerate(arguments) if x.name == name), None)
    if index is None or index < len(args):
        return None if index is None else args[index]
    return kwargs.get(name, arguments[index].default_value)


def _tensors_in(x: Any) -> Iterator[Any]:
    """Yields the tensors among the arguments of an operation."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (list, tuple, dict)):
        for item in x.values() if isinstance(x, dict) else x:
            yield from _tensors_in(item)


def _each(change: Callable[[Any], Any], x: Any) -> Any:
    """Applies ``change`` to the arguments or results of an operation; faster than functions on general trees."""
    if isinstance(x, dict):
        return {name: _each(change, item) for name, item in x.items()}
    return type(x)([_each(change, item) for item in x]) if type(x) in (list, tuple) else change(x)


def _wide(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.to(WIDE[x.dtype]) if x.dtype in WIDE else x
    return WIDE.get(x, x) if isinstance(x, torch.dtype) else x


def _narrow(x: Any) -> Any:
    return x.float() if isinstance(x, torch.Tensor) and x.dtype == torch.float64 else x
