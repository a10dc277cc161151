"""The pytest fixtures `check_step` and `audit`, which import the library only when a test uses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from gradcombine.audit import Audit
    from gradcombine.verify import StepReport


@pytest.fixture
def check_step() -> Callable[..., StepReport]:
    """`gradcombine.verify.check_step` that fails the test unless the report passes.

    ``allow`` names intended causes, as in `gradcombine.verify.StepReport.allowing`.

    ::

        def test_step(check_step):
            check_step(make_step, params, batch)
    """
    from gradcombine.verify import check_step as check

    def checked(*args: Any, allow: Sequence[str] = (), **settings: Any) -> StepReport:
        report = check(*args, **settings).allowing(*allow)
        if not report.passes:
            pytest.fail(_text(report), pytrace=False)
        return report

    return checked


@pytest.fixture
def audit() -> Callable[..., Audit]:
    """`gradcombine.audit.audit` that fails the test if it cannot decide whether a defect is present.

    ``allow`` names defects that may stay undecided, as in `gradcombine.audit.Audit.undecided`.

    ::

        def test_compiled(audit):
            assert not audit(step, *args, target="h100:8").findings
    """
    from gradcombine.audit import audit as run_audit

    def audited(*args: Any, allow: Sequence[str] = (), **settings: Any) -> Audit:
        report = run_audit(*args, **settings)
        if undecided := [name for name in report.undecided if name not in allow]:
            unread = "; ".join(report.unread)
            pytest.fail(f"cannot tell: undecided: {', '.join(undecided)}; not read: {unread}", pytrace=False)
        return report

    return audited


def _text(report: StepReport) -> str:
    """The verdict, the remedy for each cause, and the figures."""
    from gradcombine.verify.check.step_report import REMEDIES, headline

    remedies = [f"instead: {REMEDIES[x.cause]}" for x in report.faults if x.cause in REMEDIES]
    return "\n".join((headline(report), *remedies, "", str(report)))
