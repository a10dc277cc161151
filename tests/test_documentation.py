"""Listings of the README and of pages that begin with one run as they stand, and print what they say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/algebra.md", "docs/losses.md")
LISTINGS = [
    pytest.param(listing, id=f"{page} {i}")
    for page in PAGES
    for i, listing in enumerate(re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M))
]


@pytest.mark.needs("jax", "tensorflow", "optax", "keras")
@pytest.mark.parametrize("listing", LISTINGS)
def test_a_listing_prints_what_it_says(listing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import jax

    script = tmp_path / "listing.py"
    script.write_text(listing)
    said = re.findall(r"^print\(.*\)  # -> (.*)$", listing, re.M)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as users have them
        runpy.run_path(str(script))
    assert capsys.readouterr().out.splitlines() == said
    assert said or "assert " in listing
