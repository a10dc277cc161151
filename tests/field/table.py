"""Writes the table of docs/field.md: ``python -m tests.field.table ROWS``, from the lines that tests.field.run prints.

With ``--keep`` after it, rows of other packages and releases are kept.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "field.md"
BETWEEN = re.compile(r"(<!-- table -->\n).*?(<!-- end of the table -->)", re.DOTALL)
HEAD = "| package | uses | verdict | truth: off by | time | harness |\n| --- | --- | --- | --- | --- | --- |\n"


def line(row: dict[str, Any]) -> str:
    verdict = (
        "the same" if row["verdict"] == "passes" else ", ".join(x.replace("_", " ").lower() for x in row["causes"])
    )
    named = row["line"].rpartition(":")[2]
    detail = "; ".join(filter(None, (row["detail"], named and f"at line {named} of the harness")))
    cells = (
        f"{row['package']} {row['version']}",
        f"`{row['uses']}`",
        f"{verdict} ({detail})" if detail else verdict,
        f"{row['off'][1]:.1g} ({row['off'][0]:.0e} in one batch)",
        f"{row['seconds']:.0f} s",
        f"{row['lines']} lines",
    )
    return f"| {' | '.join(cells)} |\n"


def main(rows: str, keep: bool) -> None:
    page, before = PAGE.read_text(), list[str]()
    if keep and (found := BETWEEN.search(page)):
        before = [f"{x}\n" for x in found[0].splitlines() if x.startswith("| ") and f"{x}\n" not in HEAD]
    made = [line(json.loads(x)) for x in Path(rows).read_text().splitlines() if x.startswith("{")]
    lines = {tuple(x.split(" | ")[:2]): x for x in [*before, *made]}  # by package, release and use
    table = HEAD + "".join(lines[key] for key in sorted(lines))
    PAGE.write_text(BETWEEN.sub(lambda match: f"{match[1]}\n{table}\n{match[2]}", page))


if __name__ == "__main__":
    main(sys.argv[1], "--keep" in sys.argv)
