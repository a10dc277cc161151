# pyright: standard
"""Rounds the additions of gradients in PyTorch steps to the dtypes in which they run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch  # pyright: ignore[reportMissingImports]

from gradcombine.verify.check.running import NotFiniteError, NotWide, Result, Split, Subject
from gradcombine.verify.check.torch_observer import OPTIMIZER, Observer, each, tensors_in

SUMS = {f"{prefix}{name}{suffix}" for prefix in ("", "_foreach_") for name in ("add", "sub") for suffix in ("", "_")}
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
        if self.wide:
            first = 1 if func._schema.is_mutable else 0
            if any(x in NARROW for x in dtypes):
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
