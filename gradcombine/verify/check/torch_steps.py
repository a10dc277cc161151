# pyright: standard
"""Adapts PyTorch steps to NumPy arrays. Imported only if the user's program has imported torch.

A step gets copies of its modules, optimizers and tensors with the values of the arrays, and draws the same random
numbers in each run. In float64, make_step is called again, and every operation runs in float64 regardless of its dtype.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch.nn.parameter import is_lazy  # pyright: ignore[reportMissingImports]

from gradcombine import tree
from gradcombine.errors import GradCombineError, invalid
from gradcombine.types import Tree
from gradcombine.verify.check.case import Case
from gradcombine.verify.check.inner import HIDDEN, are_different, are_far, measured_once
from gradcombine.verify.check.leaves import ZERO, flattened, is_torch, widened
from gradcombine.verify.check.measure import FLOAT32_UNIT, OBSERVED, Measured
from gradcombine.verify.check.running import ONE_BATCH, NotWide, Split, Step, Subject, line
from gradcombine.verify.check.standard import Standard
from gradcombine.verify.check.torch_observer import (
    CLIPPING,
    OPTIMIZER,
    Observer,
    arrays_of,
    dense,
    tensor_of,
    tensors_in,
    tensors_of,
    to_wide,
)


def as_arrays(
    make_step: Callable[..., Step], params: Tree, batch: Tree, settings: Mapping[str, Any]
) -> tuple[Callable[..., Step], Tree, Tree, dict[str, Any]]:
    """Converts the arguments of a check to NumPy if the parameters or the batch contain PyTorch objects."""
    settings = dict(settings)
    if not any(is_torch(x) for x in [*flattened(params)[0], *flattened(batch)[0]]):
        return make_step, params, batch, settings
    leaves, structure = flattened(params)
    for path, x in zip(structure.paths(), leaves, strict=True):
        if isinstance(x, torch.nn.Module) and any(map(is_lazy, [*x.parameters(), *x.buffers()])):
            expected = "initialized modules: call lazy ones on one example first"
            raise invalid(expected, f"{type(x).__name__} with uninitialized parameters", path)
    for name, arguments in (("terms", (params, batch)), ("reference", (params, batch)), ("pad", (batch, 0))):
        value = settings.get(name)
        settings[name] = (
            TorchStep(lambda value=value: value, *arguments, "", {}) if callable(value) else arrays_of(value)
        )
    steps = TorchSteps(make_step, params, batch, settings["returns"])
    return steps, arrays_of(params), arrays_of(batch), settings


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
        self._arguments = params, batch, returns, dict[str, Any]()
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
    """A function of parameters and batch on NumPy arrays; ``make`` is called once for each precision.

    Args:
      first: what the first run of any step of a factory sets: the gradients that it returned, and zeros like those that
        optimizers received.
    """

    def __init__(
        self, make: Callable[[], Step], params: Tree, batch: Tree, returns: str, first: dict[str, Any]
    ) -> None:
        self._make, self._returns, self._first, self._left = make, returns, first, list[dict[str, Any]]()
        self._like = flattened(params), flattened(batch)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self._steps = {False: make()}

    def __call__(self, params: Tree, batch: Tree, observer: Observer | None = None, again: bool = False) -> Tree:
        values, structure = tree.split_as(self._like[0][1], params), self._like[0][1]
        leaves, batch, wide = self._arguments(values, batch)
        observed = observer or Observer(OPTIMIZER)
        observed.wide, tensors = wide, [tensors_of(x) for x in leaves]
        for path, named in zip(structure.paths(), tensors, strict=True):
            observed.names |= {p: _short(f"{path}[{name!r}]" if name else path) for name, p in named.items()}
        for named, left in zip(tensors, self._left if again else (), strict=again):
            for name, p in named.items():
                p.grad = left[name]
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng())
            stack.enter_context(observed.before_optimizer_steps())
            if wide or observer is not None:  # compiled modules do not support a dispatch mode
                stack.enter_context(observed)
                observed.watch(p for named in tensors for p in named.values())
            torch.manual_seed(0)
            step = self._steps.get(wide) or self._steps.setdefault(wide, self._make())
            torch.manual_seed(0)
            result = step(tree.unflatten(structure, leaves), batch)
        self._left = [{name: p.grad for name, p in named.items()} for named in tensors]
        for x, arrays in zip(leaves, values, strict=True):
            if type(arrays) is dict:
                arrays.update(arrays_of(x))  # a dict of the caller's, which changes in place as the module does
        zeros = self._first.setdefault("optimized", {name: np.zeros_like(x) for name, x in observed.received.items()})
        if self._returns == "params" and zeros:
            # The structure is that of the first run: a gradient scaler may skip a step if gradients are not finite.
            zeros = {name: widened(x) if wide else x for name, x in zeros.items()}
            extra = {"gradients": {name: observed.received.get(name, x) for name, x in zeros.items()}}
            result = extra if result is None else (*(result if type(result) is tuple else (result,)), extra)
        elif self._returns == "gradients" and result is None:
            grads = [{name: dense(p.grad) for name, p in named.items()} for named in tensors]
            result = tree.unflatten(structure, [x.get("", x) for x in grads])
        return self._filled(arrays_of(result), wide) if self._returns == "gradients" else arrays_of(result)

    def _filled(self, gradients: Tree, wide: bool) -> Tree:
        """Returns zeros in place of gradients that are None, but were not in the first run."""
        leaves, structure = flattened(gradients)
        first = self._first.setdefault("returned", leaves)
        if len(first) != len(leaves):
            return gradients
        zeros = [None if x is None else np.zeros_like(widened(x) if wide else x) for x in first]
        return tree.unflatten(structure, [x if y is None else y for x, y in zip(zeros, leaves, strict=True)])

    def _arguments(self, params: Sequence[Any], batch: Tree) -> tuple[list[Any], Tree, bool]:
        """Returns copies of the parameters and the batch with these values, and whether the values are wider."""
        values = [*params, *tree.split_as(self._like[1][1], batch)]
        # Copied together, because optimizers hold the parameters of modules.
        like, copies = [*self._like[0][0], *self._like[1][0]], dict[int, Any]()
        paths, leaves = [*self._like[0][1].paths(), *self._like[1][1].paths()], list[Any]()
        for path, x in zip(paths, like, strict=True):
            with _copying(x, path):
                leaves.append(new := copy.deepcopy(x, copies))
                for name in tensors_of(x).keys() - tensors_of(new).keys():  # as of a Keras Sequential
                    raise invalid("a module whose copy.deepcopy has the same parameter names", f"a copy without {name}")
        wide = any([_fill(x, y) for x, y in zip(leaves, values, strict=True)])  # noqa: C419 (each is filled)
        for x, y in zip(like, leaves, strict=True):
            for p, q in zip(tensors_of(x).values(), tensors_of(y).values(), strict=True):
                _add_attributes(p, q, copies)
        # The originals that a copy keeps alive; attributes that are copied add to them.
        for x in copies.get(id(copies), ()):
            if isinstance(x, torch.optim.Optimizer):
                with _copying(x, next((path for path, y in zip(paths, like, strict=True) if x is y), "")):
                    _add_to_optimizer(x, copies[id(x)], copies, wide)
        for x in leaves:
            if isinstance(x, torch.optim.lr_scheduler.LRScheduler):
                # It would warn that the copy of its optimizer does not count steps.
                counted: Any = partial(x.optimizer.step)
                counted._wrapped_by_lr_sched = x.optimizer._opt_called = True
                x.optimizer.step = counted
        arguments = [x if is_torch(x) else y for x, y in zip(leaves, values, strict=True)]
        count = len(params)
        return arguments[:count], tree.unflatten(self._like[1][1], arguments[count:]), wide

    def observe(self, params: Tree, batch: Tree) -> Observer:
        """Runs the step once; returns what was observed."""
        observer = Observer()
        self(params, batch, observer)
        return observer

    def corrected(self, **corrections: Any) -> Step:
        """Returns the step with corrections, which are arguments of `Observer`."""
        return lambda params, batch: self(params, batch, Observer(OPTIMIZER, **corrections))

    def up_to(self, point: str) -> Step:
        """Returns a step that returns the gradients at a point."""

        def step(params: Tree, batch: Tree) -> Tree:
            observer = Observer(point)
            self(params, batch, observer)
            return observer.gradients

        return step

    def again(self, params: Tree, batch: Tree) -> Tree:
        """Runs the step, which starts with what its last run left in ``.grad``."""
        return self(params, batch, again=True)

    def after(self, point: str) -> Step:
        """Returns a step of parameters and (batch, gradients) that replaces the gradients at a point."""
        return lambda params, replacement: self(params, replacement[0], Observer(point, replacement[1]))


def before_update(case: Case) -> Iterator[tuple[Standard, list[int]]]:
    """Yields the step up to the gradients at the optimizer or at clipping, as `inner.before_update` does."""
    standard, subject = case.standard, case.standard.subject
    steps: Any = subject.make_step
    for point in (OPTIMIZER, CLIPPING):
        inner = Subject(steps.up_to(point), subject.params, subject.batch, returns_params=False)
        try:
            one, divided = (inner.call(inner.step(x), subject.batch, case.wide)[0] for x in (ONE_BATCH, case.split))
            if not divided or one.keys() != divided.keys():
                continue
            predicted = subject.run(ONE_BATCH, (subject.batch, divided), case.wide, steps(1).after(point)).floats
            leaves = [i for i, (path, _) in enumerate(subject.param_leaves) if _short(path) in divided]  # no buffers
            if case.accounts_for(predicted, 1, [*(leaves or range(len(subject.param_leaves))), *standard.observed]):
                yield measured_once(standard, point, inner.make_step), []
        except (NotWide, ValueError):
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
        noise, threshold = [0.0] * len(values), HIDDEN * min(standard.unit, FLOAT32_UNIT)
        standard.gradient_examined |= are_far(values, last_values, noise, threshold)
        differs = are_far(values, others, noise, threshold)
        clipped = measured_once(standard, CLIPPING, inner.make_step) if differs else None
        if clipped is not None and are_different(clipped, split):
            yield clipped, False
    except (NotWide, GradCombineError):
        return


def updates(subject: Subject, split: Split) -> int:
    """Returns the number of steps that the optimizers of a division make."""
    step: Any = subject.step(split)
    return step.observe(subject.params, subject.batch).updates


def updates_by_rounding(measured: Measured, sizes: np.ndarray) -> np.ndarray:
    """Bound of each update whose gradient at the optimizer is only rounding, which Adam enlarges; 0 for other leaves.

    Args:
      measured: the step.
      sizes: sizes of the leaves.
    """
    names, leaves = measured.names, measured.observed
    largest = max((sizes[i] for i in leaves), default=0.0)
    zero = {names[i].partition(OBSERVED)[2] for i in leaves if sizes[i] <= ZERO * largest}
    params = [f"{_short(path)}']" in zero for path, _ in measured.subject.param_leaves]
    largest_update = max(sizes[: len(params)], default=0.0)
    return np.array([largest_update * x for x in params] + [0.0] * (len(names) - len(params)))


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


@contextmanager
def _copying(x: Any, path: str) -> Iterator[None]:
    """Names an object that cannot be copied, or its path."""
    try:
        yield
    except GradCombineError as error:
        error.within(path)
        raise
    except Exception as error:  # an object of the user's may raise anything
        expected = "objects that copy.deepcopy copies, because each run gets copies"
        raise invalid(expected, f"{type(x).__name__}, {type(error).__name__}: {line(error)}", path) from error


def _add_to_optimizer(optimizer: Any, new: Any, copies: dict[int, Any], wide: bool) -> None:
    """Adds the hooks of steps and the attributes of an optimizer to its copy, as copy.deepcopy does not; widens them.

    Raises:
      GradCombineError: for a step that is not that of the class: a function that would change the original.
    """
    for name, value in list(vars(optimizer).items()):
        if name == "step":
            # A learning rate scheduler wraps the step of the class, to count the calls.
            counted = hasattr(value, "_wrapped_by_lr_sched")
            if not counted or getattr(value, "__wrapped__", None) is not type(optimizer).step:
                expected = "optimizers whose step is that of their class, because copies run it (hooks are kept)"
                raise invalid(expected, f"{type(optimizer).__name__} with another one")
        elif name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            vars(new)[name] = type(value)((key, _hook(hook, copies)) for key, hook in value.items())
        elif name not in vars(new):
            vars(new)[name] = copy.deepcopy(value, copies)
    for x in tensors_in(vars(new)) if wide else ():
        x.data = to_wide(x.data)


def _hook(hook: Any, copies: dict[int, Any]) -> Any:
    """Returns a hook of an optimizer for its copy: bound to the copy if it is a method of an original.

    Raises:
      GradCombineError: for a function with a variable that is an original, which it would change instead of the copy.
    """
    if isinstance(hook, MethodType):
        return MethodType(hook.__func__, copies.get(id(hook.__self__), hook.__self__))
    if isinstance(hook, FunctionType):
        variables = inspect.getclosurevars(hook)
        used = [name for name, x in {**variables.globals, **variables.nonlocals}.items() if id(x) in copies]
        if used:
            expected = "hooks of optimizers that use the optimizer they receive, because they run on copies"
            raise invalid(expected, f"{hook.__name__}, which uses the variable {used[0]}")
    return hook


def _fill(x: Any, values: Any) -> bool:
    """Writes values into the tensors of a leaf; returns whether this widens them."""
    widens = False
    for name, tensor in tensors_of(x).items():
        new = tensor_of(values[name] if name else values, tensor)
        widens |= new.dtype != tensor.dtype
        tensor.data = new
    return widens
