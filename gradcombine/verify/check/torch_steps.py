# pyright: standard
"""Steps of PyTorch as steps of NumPy arrays; imported where a program has imported torch.

A step gets copies of its modules, optimizers and tensors, with the values of the arrays, and draws the same random
numbers each time. In float64 it is made and run with every operation in float64, whatever dtype the program asks for.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch.optim.optimizer import register_optimizer_step_pre_hook  # pyright: ignore[reportMissingImports]
from torch.utils._python_dispatch import TorchDispatchMode  # pyright: ignore[reportMissingImports]

from gradcombine import tree
from gradcombine.types import Tree
from gradcombine.verify.check.case import Case, accounts_for
from gradcombine.verify.check.leaves import flattened, is_float_dtype, is_torch, widened
from gradcombine.verify.check.measure import StepStandard
from gradcombine.verify.check.running import WHOLE, NotFiniteError, NotWide, Step, Subject
from gradcombine.verify.diff.pytorch import converted

OPTIMIZER, CLIPPING = "optimizer", "clipping"
"""Where gradients are looked at: as an optimizer gets them, and as what clips them does."""

Optimized = list[dict[str, np.ndarray]]
"""Zeros for the parameters that optimizers got in the first run of all steps; empty before it."""

WIDE = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64)
WIDE |= dict.fromkeys((torch.complex32, torch.complex64), torch.complex128)
PRODUCTS = re.compile(r"mm\.|mv\.|dot|convolution|rnn|lstm|gru")
CLIPS = re.compile(r"norm|clamp")
"""Operations that clip gradients, or measure them for it."""


def as_arrays(
    make_step: Callable[..., Step], params: Tree, batch: Tree, settings: Mapping[str, Any]
) -> tuple[Callable[..., Step], Tree, Tree, dict[str, Any]]:
    """The arguments of a check in NumPy, where parameters or batch hold objects of PyTorch; else as they are."""
    given = dict(settings)
    if not any(is_torch(x) for x in [*flattened(params)[0], *flattened(batch)[0]]):
        return make_step, params, batch, given
    for name, arguments in (("terms", (params, batch)), ("reference", (params, batch)), ("pad", (batch, 0))):
        value = given.get(name)
        given[name] = TorchStep(lambda value=value: value, *arguments) if callable(value) else _arrays(value)
    steps = TorchSteps(make_step, params, batch, given["returns"])
    return steps, _arrays(params), _arrays(batch), given


class TorchSteps:
    """The steps of a factory as steps of NumPy arrays.

    Args:
      make_step: ``make_step(microbatches)``, or ``make_step(microbatches, devices=...)``.
      params, batch: what the steps take.
      returns: "gradients": of a step that returns nothing, the ``.grad`` of its parameters is taken. "params": the
        gradients that optimizers get come after the result, since Adam's first step hardly tells their lengths.
    """

    framework = "torch"

    def __init__(self, make_step: Callable[..., Step], params: Tree, batch: Tree, returns: str) -> None:
        self._make_step, self._others = make_step, (params, batch, returns, list[dict[str, np.ndarray]]())

    def __call__(self, microbatches: int, **devices: int) -> TorchStep:
        return TorchStep(partial(self._make_step, microbatches, **devices), *self._others)

    def up_to(self, place: str) -> Callable[..., Step]:
        """The factory of steps that return the gradients at a place."""
        return lambda microbatches, **devices: self(microbatches, **devices).up_to(place)


class TorchStep:
    """A function of parameters and batch as one of NumPy arrays; it is made once for each precision."""

    def __init__(
        self, make: Callable[[], Step], params: Tree, batch: Tree, returns: str = "", optimized: Optimized | None = None
    ) -> None:
        self._make, self._returns, self._optimized = make, returns, [] if optimized is None else optimized
        self._like = flattened(params), flattened(batch)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self._made = {False: make()}

    def __call__(self, params: Tree, batch: Tree, watch: Watched | None = None) -> Tree:
        values, structure = tree.split_as(self._like[0][1], params), self._like[0][1]
        leaves, batch, wide = self._entered(values, batch)
        seen = watch or Watched(OPTIMIZER)
        seen.wide, inside = wide, [_tensors(x) for x in leaves]
        for path, named in zip(structure.paths(), inside, strict=True):
            seen.names |= {p: _short(f"{path}[{name!r}]" if name else path) for name, p in named.items()}
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng())
            stack.enter_context(register_optimizer_step_pre_hook(seen.stepped))
            if wide or watch is not None:  # compiled modules cannot be seen through
                stack.enter_context(seen)
            torch.manual_seed(0)
            step = self._made.get(wide) or self._made.setdefault(wide, self._make())
            torch.manual_seed(0)
            made = step(tree.unflatten(structure, leaves), batch)
        for x, arrays in zip(leaves, values, strict=True):
            if isinstance(x, torch.nn.Module):
                arrays.update(_arrays(x))  # a dict of the caller's, which changes in place as the module does
        if not self._optimized:
            self._optimized.append({name: np.zeros_like(x) for name, x in seen.found.items()})
        if self._returns == "params" and (zeros := self._optimized[0]):
            # As in the first run: a scaler of gradients that are not finite leaves a step out.
            none = {name: widened(x) if wide else x for name, x in zeros.items()}
            others = {"gradients": {name: seen.found.get(name, x) for name, x in none.items()}}
            made = others if made is None else (*(made if type(made) is tuple else (made,)), others)
        elif self._returns == "gradients" and made is None:
            grads = [{name: p.grad for name, p in named.items()} for named in inside]
            made = tree.unflatten(structure, [x.get("", x) for x in grads])
        return _arrays(made)

    def _entered(self, params: Sequence[Any], batch: Tree) -> tuple[list[Any], Tree, bool]:
        """Copies of the leaves of the parameters, and of the batch, with these values; whether they are wider."""
        values = [*params, *tree.split_as(self._like[1][1], batch)]
        leaves = copy.deepcopy([*self._like[0][0], *self._like[1][0]])  # at once: optimizers hold modules' parameters
        wide = any([_fill(x, y) for x, y in zip(leaves, values, strict=True)])  # noqa: C419 (each is filled)
        for x in leaves:
            if wide and isinstance(x, torch.optim.Optimizer):
                x.state.update({p: _each(_wide, state) for p, state in x.state.items()})
        entered = [x if is_torch(x) else y for x, y in zip(leaves, values, strict=True)]
        count = len(params)
        return entered[:count], tree.unflatten(self._like[1][1], entered[count:]), wide

    def read(self, params: Tree, batch: Tree) -> Watched:
        """Runs it once, watched."""
        watch = Watched()
        self(params, batch, watch)
        return watch

    def up_to(self, place: str) -> Step:
        """The step that returns the gradients at a place."""

        def step(params: Tree, batch: Tree) -> Tree:
            watch = Watched(place)
            self(params, batch, watch)
            return watch.found

        return step

    def after(self, place: str) -> Step:
        """The step of (batch, gradients) that goes on with these gradients at a place."""
        return lambda params, given: self(params, given[0], Watched(place, given[1]))


class Watched(TorchDispatchMode):
    """The operations of a step, one after the other; in float64, those on random numbers apart, where that is asked.

    Args:
      place: where gradients are looked at.
      given: the gradients to put in their place there.

    Attributes:
      products: the dtypes of the operands of products of matrices.
      drawn: those of what random numbers are drawn for.
      updates: how often optimizers have made a step.
      found: the last gradients there, by the names of their parameters.
    """

    def __init__(self, place: str = "", given: Mapping[str, np.ndarray] | None = None) -> None:
        super().__init__()
        self.wide, self.names = False, dict[Any, str]()
        self.products, self.drawn, self.found = set[Any](), set[Any](), dict[str, np.ndarray]()
        self._place, self._given, self.updates = place, given, 0

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """Called before each step of an optimizer."""
        if self._place == OPTIMIZER:
            for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
                self._visit(self.names.setdefault(p, str(len(self.names))), p.grad)
        self.updates += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, draws = kwargs or {}, torch.Tag.nondeterministic_seeded in func.tags
        if not self.wide or self._place:
            self._see(str(func), [x for x in _tensors_in((args, kwargs)) if x.is_floating_point()], draws)
        if not self.wide:
            return func(*args, **kwargs)
        kept = 1 if func._schema.is_mutable else 0
        if draws:  # the same numbers as in float32
            made = func(*_each(_narrow, args), **_each(_narrow, kwargs))
            return args[0].copy_(made) if kept else _each(_wide, made)
        if "_amp_" in func.__name__:  # scales of gradients, which are float32 to them
            narrow = [_narrow(x) if isinstance(x, torch.Tensor) else x for x in args]
            made = func(*narrow, **kwargs)
            for x, y in zip(_tensors_in(args[:2]), _tensors_in(narrow[:2]), strict=True):
                x.copy_(y)
            return made
        if any(x.dtype in WIDE for x in _tensors_in(args[:kept])):
            raise NotWide(f"{func} changes a tensor in place that is narrower")
        made = func(*args[:kept], *_each(_wide, args[kept:]), **_each(_wide, kwargs))
        return made if kept else _each(_wide, made)

    def _see(self, name: str, floats: Sequence[Any], draws: bool) -> None:
        if draws:
            self.drawn.update([x.dtype for x in floats] or [torch.float32])
        if PRODUCTS.search(name):
            self.products.update(x.dtype for x in floats)
        if self._place == CLIPPING and CLIPS.search(name):
            gradients = {p.grad.data_ptr(): (name, p.grad) for p, name in self.names.items() if p.grad is not None}
            for found in {x.data_ptr() for x in floats} & set(gradients):
                self._visit(*gradients[found])

    def _visit(self, name: str, gradient: Any) -> None:
        if self._given is not None:
            gradient.copy_(_tensor(self._given[name], gradient))
        self.found[name] = _arrays(gradient)


def before_update(standard: StepStandard, case: Case) -> Iterator[StepStandard]:
    """Steps up to the gradients that an optimizer gets, or what clips them, where these lead to the result."""
    subject = standard.subject
    steps: Any = subject.make_step
    for place in (OPTIMIZER, CLIPPING):
        inner = Subject(steps.up_to(place), subject.params, subject.batch, returns_params=False)
        run = subject.wide if case.wide else subject.run
        try:
            one, made = (inner.called(inner.step(x), subject.batch, case.wide)[0] for x in (WHOLE, case.split))
            if not made or one.keys() != made.keys():
                continue
            predicted = run(WHOLE, (subject.batch, made), step=steps(1).after(place)).floats
            leaves = [i for i, (path, _) in enumerate(subject.param_leaves) if _short(path) in made]  # no buffers
            if accounts_for(standard, case, predicted, 1, leaves or range(len(subject.param_leaves))):
                yield StepStandard(inner, standard.unit)
        except (NotWide, NotFiniteError, ValueError):
            continue


def _tensors(x: Any) -> dict[str, Any]:
    """A tensor, or the parameters and floating buffers of a module, each once, by their names."""
    if not isinstance(x, torch.nn.Module):
        return {"": x} if isinstance(x, torch.Tensor) else {}
    buffers = {name: buffer for name, buffer in x.named_buffers() if buffer.is_floating_point()}
    return {**dict(x.named_parameters()), **buffers}


def _arrays(value: Tree) -> Tree:
    """A tree with NumPy arrays for tensors, dicts of them for modules, and nothing for optimizers."""
    leaves, structure = flattened(value)
    made = [_tensors(x) if isinstance(x, torch.nn.Module) else x for x in leaves]
    made = [None if isinstance(x, torch.optim.Optimizer) else converted(x) for x in made]
    return tree.unflatten(structure, made)


def _short(path: str) -> str:
    """The path of a leaf as PyTorch writes names: ``model.layer.weight``."""
    return path.replace("']['", ".").replace("['", "").replace("']", "")


def _fill(x: Any, values: Any) -> bool:
    """Gives the tensors of a leaf these values; whether that widens them."""
    widens = False
    for name, tensor in _tensors(x).items():
        new = _tensor(values[name] if name else values, tensor)
        widens |= new.dtype != tensor.dtype
        tensor.data = new
    return widens


def _tensor(array: np.ndarray, like: Any) -> Any:
    """An array as a tensor like another one, or in float64 where it is."""
    dtype = {np.dtype(x): y for x, y in ((np.float64, torch.float64), (np.complex128, torch.complex128))}
    values = widened(array) if is_float_dtype(array.dtype) else array
    return torch.tensor(values, dtype=dtype.get(array.dtype, like.dtype), device=like.device)


def _tensors_in(x: Any) -> Iterator[Any]:
    """The tensors among the arguments of an operation."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (list, tuple, dict)):
        for item in x.values() if isinstance(x, dict) else x:
            yield from _tensors_in(item)


def _each(change: Callable[[Any], Any], x: Any) -> Any:
    """Arguments or results of an operation with each of them changed; quicker than functions on any tree."""
    if isinstance(x, dict):
        return {name: _each(change, item) for name, item in x.items()}
    return type(x)([_each(change, item) for item in x]) if type(x) in (list, tuple) else change(x)


def _wide(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return x.to(WIDE[x.dtype]) if x.dtype in WIDE else x
    return WIDE.get(x, x) if isinstance(x, torch.dtype) else x


def _narrow(x: Any) -> Any:
    return x.float() if isinstance(x, torch.Tensor) and x.dtype == torch.float64 else x
