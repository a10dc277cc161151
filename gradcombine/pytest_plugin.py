"""Fixtures for pytest: `check_step` and `audit`. Nothing is imported before a test asks for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from gradcombine.audit import Audit
    from gradcombine.verify import StepReport


@pytest.fixture
def check_step() -> Callable[..., StepReport]:
    """`gradcombine.verify.check_step`, which fails the test unless the report passes.

    ``allow`` names causes that are by design, as `gradcombine.verify.StepReport.allowing` takes them.

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
    """`gradcombine.audit.audit`, which fails the test if a defect can be neither found nor excluded.

    ``allow`` names defects that may stay undecided, as `gradcombine.audit.Audit.undecided` does.

    ::

        def test_compiled(audit):
            assert not audit(step, *args, target="h100:8").findings
    """
    from gradcombine.audit import audit as function

    def audited(*args: Any, allow: Sequence[str] = (), **settings: Any) -> Audit:
        report = function(*args, **settings)
        if left := [name for name in report.undecided if name not in allow]:
            unread = "; ".join(report.unread)
            pytest.fail(f"cannot tell: undecided: {', '.join(left)}; not read: {unread}", pytrace=False)
        return report

    return audited


def _text(report: StepReport) -> str:
    """The verdict, what to write instead of each cause, and the figures."""
    from gradcombine.verify.check.check_report import REMEDIES, verdict

    instead = [f"instead: {REMEDIES[x.cause]}" for x in report.faults if x.cause in REMEDIES]
    return "\n".join((verdict(report), *instead, "", str(report)))
