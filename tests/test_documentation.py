"""The listings of the README and the pages run unchanged and print what their comments say; pages keep to the style."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "docs/algebra.md",
    *(f"docs/api/{path.name}" for path in sorted((ROOT / "docs/api").glob("*.md"))),
    "docs/flight_recorder.md",
    "docs/guides/horovod.md",
    "docs/guides/jax.md",
    "docs/index.md",
    "docs/losses.md",
    "docs/outer.md",
    "docs/reliability.md",
    "docs/replicated.md",
    "docs/tasks.md",
)
PROGRAMS = ("docs/audit.md", "docs/plan.md", "docs/state_files.md", "docs/verification.md")
"""Pages whose listings continue each other, so that a page runs as one program."""


def listings(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.S | re.M)


LISTINGS = [pytest.param(x, id=f"{page} {i}") for page in PAGES for i, x in enumerate(listings(page))]
LISTINGS += [pytest.param("\n".join(listings(page)), id=page, marks=pytest.mark.full) for page in PROGRAMS]


@pytest.mark.sampled
@pytest.mark.needs("jax", "tensorflow", "optax", "keras")
@pytest.mark.parametrize("listing", LISTINGS)
def test_a_listing_prints_what_it_says(
    listing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import jax

    script = tmp_path / "listing.py"
    script.write_text(listing)
    monkeypatch.chdir(tmp_path)
    expected = re.findall(r"^print\(.*\)  # -> (.*)$", listing, re.M)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as users have them
        runpy.run_path(str(script))
    assert capsys.readouterr().out.splitlines() == expected
    assert expected or "assert " in listing


@pytest.mark.parametrize("name", ["algebra", "losses", "performance", "wires"])
def test_pictures_are_those_that_their_scripts_draw(name: str) -> None:
    script = runpy.run_path(str(ROOT / "docs" / f"draw_{name}.py"))
    for theme in script["THEMES"]:
        assert (ROOT / f"docs/static/{name}-{theme}.svg").read_text() == script["picture"](theme)


@pytest.mark.parametrize("name", ["performance", "wires"])
def test_the_tables_are_those_of_what_is_stored(name: str) -> None:
    script = runpy.run_path(str(ROOT / "docs" / f"draw_{name}.py"))
    assert script["PAGE"].read_text() == script["page"]()


METAPHORS = re.compile(r"\bdoors?\b|\bways? over\b|\bhouses?\b|\bparts? company\b|\bwhere (they|two runs) part\b")
"""The field has plain words for them: integration, migration, diverge, resume."""
STRANGE = re.compile(
    METAPHORS.pattern
    + r"|\b(rooms?|told|tells|mend(s|ed)?|anew|refus(es?|ed|al)|a turn|turns? of (a|the) loop|how often it turns"
    r"|whoever|whichever)\b",
    re.IGNORECASE,
)
"""Words that pages and messages avoid; write report or show, fix, again, raise or reject, iteration, any."""


def prose(path: Path) -> str:
    """The text of a page without listings, code spans and link targets."""
    text = re.sub(r"^(```+|:::+)(?!\{glossary).*?^\1 *$", "", path.read_text(), flags=re.S | re.M)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)


def messages(path: Path) -> str:
    """The string literals of a module, without its docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    docstrings = {id(x.value) for x in nodes if isinstance(x, ast.Expr)}
    strings = (x for x in nodes if isinstance(x, ast.Constant) and id(x) not in docstrings)
    return "\n".join(x.value for x in strings if isinstance(x.value, str) and " " in x.value)


def test_pages_and_messages_use_the_words_of_the_field() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("gradcombine/**/*.md")]
    modules = [*ROOT.glob("gradcombine/**/*.py"), *ROOT.glob("examples/**/*.py")]
    found = [(path, word[0]) for path in pages for word in STRANGE.finditer(prose(path))]
    found += [(path, word[0]) for path in modules for word in STRANGE.finditer(messages(path))]
    found += [(path, word[0]) for path in modules for word in METAPHORS.finditer(path.read_text())]
    assert not [f"{path.relative_to(ROOT)}: {word}" for path, word in found]


WORD = re.compile(r"\S*[A-Za-z]\S*")
GENERATED = re.compile(r"<!-- (?:table|ratios: begin) -->.*?<!-- (?:end of the table|ratios: end) -->", re.S)
"""Generated tables, in docs/field.md and docs/performance.md."""


def words(path: Path) -> int:
    """The number of words in a page; a code span is one word.

    Fenced blocks (listings, pictures, navigation, the glossary), link targets, comments and generated tables are not
    counted.
    """
    text = re.sub(r"^(```+|:::+).*?^\1 *$", "", GENERATED.sub("", path.read_text()), flags=re.S | re.M)
    text = re.sub(r"<!--.*?-->|<a id=[^>]*></a>|^\[\w+\]: \S+$", "", text, flags=re.S | re.M)
    return len(WORD.findall(re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", text))))


def test_the_pages_have_15000_words_at_most() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/*.md")]
    assert sum(words(page) for page in pages) <= 15_000


def test_the_readme_has_600_words_beside_listings_at_most() -> None:
    assert len(WORD.findall(prose(ROOT / "README.md"))) <= 600


def test_each_of_fifteen_tasks_has_one_listing() -> None:
    _, *tasks = (ROOT / "docs/tasks.md").read_text().split("\n## ")
    assert [task.count("```python\n") for task in tasks] == [1] * 15
