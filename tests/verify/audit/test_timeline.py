"""The timeline of one call against widths worked out by hand, and the page that contains it."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest

from gradcombine.audit import Audit, audit_file
from gradcombine.audit import audit_report as report
from gradcombine.audit.timeline import BINS, timeline
from gradcombine.reporting import page
from tests.verify.audit.test_hlo import FUSED

TEXT = """HloModule jit_step, is_scheduled=true, entry_computation_layout={()->()}, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%body (p: (f32[], f32[64,64], f32[64,64])) -> (f32[], f32[64,64], f32[64,64]) {
  %p = (f32[], f32[64,64], f32[64,64]) parameter(0)
  %i = f32[] get-tuple-element(%p), index=0
  %a = f32[64,64] get-tuple-element(%p), index=1
  %b = f32[64,64] get-tuple-element(%p), index=2
  %all = f32[64,64] all-reduce(%b), replica_groups=[1,8]<=[8], to_apply=%add
  %more = f32[64,64] add(%a, %all)
  ROOT %t = (f32[], f32[64,64], f32[64,64]) tuple(%i, %more, %b)
}

%cond (q: (f32[], f32[64,64], f32[64,64])) -> pred[] {
  %q = (f32[], f32[64,64], f32[64,64]) parameter(0)
  %j = f32[] get-tuple-element(%q), index=0
  ROOT %lt = pred[] compare(%j, %j), direction=LT
}

ENTRY %main (w: f32[64,64], v: f32[64,64]) -> f32[64,64] {
  %w = f32[64,64] parameter(0), sharding={replicated}
  %v = f32[64,64] parameter(1)
  %zero = f32[] constant(0)
  %product = f32[64,64] dot(%w, %v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %init = (f32[], f32[64,64], f32[64,64]) tuple(%zero, %product, %v)
  %loop = (f32[], f32[64,64], f32[64,64]) while(%init), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %out = f32[64,64] get-tuple-element(%loop), index=1
}
"""  # noqa: E501
SIZE = 64 * 64 * 4
SENT = Fraction(7, 4) * SIZE


@pytest.fixture
def step(tmp_path: Path) -> Audit:
    (tmp_path / "step.txt").write_text(TEXT)
    return audit_file(tmp_path / "step.txt")[0]


def test_where_nothing_is_published_widths_are_bytes(step: Audit) -> None:
    drawing = timeline(step)
    assert drawing is not None
    # A product of two arrays; then, per iteration, an all-reduce, which reads and writes one array, and a sum of two.
    product, exchange, total = 3 * SIZE, 2 * SIZE + SENT, 3 * SIZE + 2 * SIZE + SENT + 3 * SIZE
    (band,) = drawing.bands
    assert band.label == "x 5" and band.words.startswith("a loop of 5 iterations")
    assert [band.start, band.width] == pytest.approx([float(product / total), float(1 - product / total)])
    assert [mark.at for mark in drawing.marks] == pytest.approx([float((product + exchange / 2) / total)])
    assert drawing.marks[0].words == "1: all-reduce of 16.0 KiB over 8 devices, 5 times in a call"
    # Areas are fractions of all bytes; the single product has the full height of its lane.
    areas = {name: sum(heights) / BINS for name, heights in drawing.lanes.items()}
    expected = {"compute": product, "memory": total - SENT, "exchange": SENT}
    assert areas == pytest.approx({name: float(part / total) for name, part in expected.items()})


def test_widths_are_times_at_the_bound_where_rates_are_published(tmp_path: Path) -> None:
    (tmp_path / "step.txt").write_text(TEXT)
    (one,) = audit_file(tmp_path / "step.txt", "h100:8")
    drawing = timeline(one)
    assert drawing is not None
    memory, link = Fraction(3_350_000_000_000), Fraction(450_000_000_000)
    times = [3 * SIZE / memory, max(2 * SIZE / memory, SENT / link), 3 * SIZE / memory]
    assert drawing.bands[0].start == pytest.approx(float(times[0] / sum(times)))
    # The all-reduce takes longer than its memory traffic.
    assert sum(drawing.lanes["exchange"]) / BINS == pytest.approx(float(times[1] / sum(times)))
    assert drawing.length == f"{float(sum(times)) * 1e9:.3g} ns"


def test_a_collective_in_a_fusion_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "step.txt").write_text(FUSED)
    drawing = timeline(audit_file(tmp_path / "step.txt")[0])
    assert drawing is not None
    # The fusion reads 1024 rows and writes 128.
    row, sent = 4 * 8, Fraction(7, 8) * 4 * 8 * 1024
    assert sum(drawing.lanes["exchange"]) / BINS == pytest.approx(float(sent / (sent + row * (1024 + 128))))
    assert [mark.words for mark in drawing.marks] == ["1: reduce-scatter of 32.0 KiB over 8 devices"]


def test_a_page_needs_nothing_beside_it(step: Audit, tmp_path: Path) -> None:
    hostile = step._replace(name="<b>jit</b>")
    assert [x.name for x in step.findings] == ["reduced-in-loop"]
    sections = report.page_sections([hostile], frozenset(["reduced-in-loop"]))
    page.write(tmp_path / "page.html", "audit", "1 finding", False, sections)
    text = (tmp_path / "page.html").read_text()
    assert not re.search(r"https?://|<script|<link|<b>jit|src=(?!\"data:)", text)
    for link in re.findall(r'href="#([^"]*)"', text):
        assert f'id="{link}"' in text
    assert text.count('<a href="#reduced-in-loop">') == 1
    assert "<em>Gradients are reduced in each microbatch instead of once per window.</em>" in text
    assert text.count("<path ") == 3 and ">x 5</text>" in text and "prefers-color-scheme: dark" in text


def test_a_program_that_does_nothing_has_no_drawing(tmp_path: Path) -> None:
    entry = "ENTRY %main (w: f32[4]) -> f32[4] {\n  ROOT %w = f32[4] parameter(0)\n}\n"
    (tmp_path / "nothing.txt").write_text("HloModule jit_nothing, is_scheduled=true\n\n" + entry)
    (one,) = audit_file(tmp_path / "nothing.txt")
    assert timeline(one) is None
    page.write(tmp_path / "page.html", "audit", "clean", True, report.page_sections([one], frozenset()))
    assert "nothing is computed, moved or exchanged" in (tmp_path / "page.html").read_text()
