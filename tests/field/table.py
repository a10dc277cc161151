"""Writes the table of docs/field.md: ``python -m tests.field.table ROWS``, of the lines that tests.field.run prints."""

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
    detail = f" ({row['detail']})" if row["detail"] else ""
    cells = (
        f"{row['package']} {row['version']}",
        f"`{row['uses']}`",
        f"{verdict}{detail}",
        f"{row['off'][1]:.1g} ({row['off'][0]:.0e} in one batch)",
        f"{row['seconds']:.0f} s",
        f"{row['lines']} lines",
    )
    return f"| {' | '.join(cells)} |\n"


def main(rows: str) -> None:
    found = [json.loads(x) for x in Path(rows).read_text().splitlines() if x.startswith("{")]
    table = HEAD + "".join(map(line, sorted(found, key=lambda row: (row["package"], row["version"], row["uses"]))))
    PAGE.write_text(BETWEEN.sub(lambda match: f"{match[1]}\n{table}\n{match[2]}", PAGE.read_text()))


if __name__ == "__main__":
    main(sys.argv[1])
