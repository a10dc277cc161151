"""Measures the size of the source and of calls into it against aims: python benchmarks/counts.py [--walks] [--check]

Definitions, chosen so that counts cannot be improved by hiding what they count:

- Each call of a function, class body or comprehension counts. Its frame belongs to the package if its globals do,
  regardless of the file name, so generated methods of dataclasses and NamedTuples count as well.
- All `functools` caches of the package and the registry of known types are cleared before a walk. Imports and
  backends, which a process loads once, are warm.
- Docstrings that begin with a pronoun, `Any`, and constructed errors are found in the syntax tree, not in the text.

--walks measures only the walks without a framework; with --check, the exit status is 1 if an aim is missed.
"""

from __future__ import annotations

import argparse
import ast
import gc as garbage
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import _lru_cache_wrapper
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

import gradcombine as gc
from gradcombine import reductions

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "gradcombine"
PRONOUN = re.compile(r"(The same|What|Those|Whose|Which|That|Of which|None of)\b")


class Count(NamedTuple):
    """A count and its aim.

    Attributes:
      name: the label of the row.
      value: the count.
      aim: the largest acceptable value, or None.
    """

    name: str
    value: float
    aim: float | None = None


class Walk(NamedTuple):
    """What one call executes in the package.

    Attributes:
      files: the number of files whose functions are called.
      functions: the number of distinct functions.
      calls: the number of calls.
      depth: the largest number of nested frames.
    """

    files: int
    functions: int
    calls: int
    depth: int


def walk(run: Callable[[], Any]) -> Walk:
    """Counts the calls of the package's functions during ``run()``, with empty caches."""
    files: set[str] = set()
    functions: set[tuple[str, str]] = set()
    calls = depth = most = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls, depth, most
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("gradcombine") or event not in ("call", "return"):
            return
        if event == "return":
            depth -= 1
            return
        calls, depth = calls + 1, depth + 1
        most = max(most, depth)
        files.add(module)
        functions.add((module, frame.f_code.co_qualname))

    empty_caches()
    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Walk(len(files), len(functions), calls, most)


def empty_caches() -> None:
    """Clears the caches of the package's functions."""
    for each in garbage.get_objects():
        # A backend is imported once in a process.
        own = isinstance(each, _lru_cache_wrapper) and (each.__module__ or "").startswith("gradcombine")
        if own and each.__name__ != "load":
            each.cache_clear()
    types = importlib.import_module("gradcombine.backends.registry").LEAF_TYPES
    for met in [each for each, backend in types.items() if backend is not None]:
        del types[met]


def walks(leaves: int = 1) -> dict[str, Walk]:
    """The walks without a framework: a mean of three trees, and one update of a window."""
    trees = [{str(i): np.float32([1, 2]) for i in range(leaves)} if leaves > 1 else np.float32([1, 2])] * 3
    acc = gc.accumulate(reductions.mean(), every=9)
    state = acc.update(trees[0], acc.init(trees[0]))
    calls = {
        "mean of three NumPy arrays": lambda: gc.mean(trees),
        "one NumPy update": lambda: acc.update(trees[0], state),
    }
    found: dict[str, Walk] = {}
    for name, call in calls.items():
        call()  # imports
        found[name] = walk(call)
    return found


def sources(folder: str) -> list[Path]:
    """The Python files under version control."""
    listed = subprocess.run(["git", "ls-files", f"{folder}/*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def definitions(trees: dict[Path, ast.Module]) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef]:
    for tree in trees.values():
        yield from (x for x in ast.walk(tree) if isinstance(x, (ast.Module, ast.ClassDef, ast.FunctionDef)))


def parameters(function: ast.FunctionDef) -> list[ast.arg]:
    given = function.args
    own = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return [x for x in own if x.arg not in ("self", "cls")]


LISTED = """
import importlib, jax, json, keras, optax, tensorflow
names = set()
for path in {modules!r}:
    module = importlib.import_module(path)
    own = [name for name, x in vars(module).items() if getattr(x, "__module__", None) == path and name[0] != "_"]
    names.update((path, name) for name in getattr(module, "__all__", own))
print(json.dumps(len(names)))
"""


def public_names() -> int:
    """The number of public names in the documented modules, PUBLIC in docs/conf.py."""
    conf = (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")
    (value,) = re.findall(r"^PUBLIC = (\(.*?^\))", conf, re.MULTILINE | re.DOTALL)
    program = LISTED.format(modules=eval(value))
    printed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(printed.stdout.splitlines()[-1])


def counts() -> list[Count]:
    """All counts of the source."""
    own, tests = sources("gradcombine"), sources("tests")
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in own}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    code = sum(
        bool(text.strip()) and not text.strip().startswith("#")
        for path in own
        for text in path.read_text(encoding="utf-8").splitlines()
    )
    documented = [text for x in definitions(trees) if (text := ast.get_docstring(x)) is not None]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    named = [node.id for node in nodes if isinstance(node, ast.Name)]
    raised = [
        x
        for x in nodes
        if isinstance(x, ast.Call) and ast.unparse(x.func).split(".")[-1] in ("GradCombineError", "invalid")
    ]
    longest = max(own, key=lines)
    names = [path.stem for path in own if path.stem != "__init__"]
    return [
        Count("lines in gradcombine/", sum(map(lines, own)), 28_000),
        Count("files", len(own), 130),
        Count(f"lines of the longest file ({longest.relative_to(PACKAGE)})", lines(longest), 400),
        Count("files that share their name with another", sum(names.count(name) > 1 for name in names)),
        Count("lines of tests", sum(map(lines, tests)), 26_000),
        Count(
            f"docstrings of {len(documented)} that begin with a pronoun",
            sum(map(bool, map(PRONOUN.match, documented))),
            0,
        ),
        Count("Any per 1,000 code lines", round(1000 * named.count("Any") / code), 25),
        Count("places that build an error", len(raised), 200),
        Count(
            "functions with an operation parameter",
            sum(any(x.arg == "operation" for x in parameters(f)) for f in functions),
            40,
        ),
        Count(
            "most parameters of a public function", max(len(parameters(f)) for f in functions if f.name[0] != "_"), 10
        ),
        Count("public names in documented modules", public_names(), 120),
    ]


def walk_rows() -> list[Count]:
    aims = {"mean of three NumPy arrays": (8, 50, 150, 9), "one NumPy update": (None, None, 60, None)}
    rows: list[Count] = []
    for name, found in walks().items():
        for part, value, aim in zip(Walk._fields, found, aims[name], strict=True):
            rows.append(Count(f"{name}: {part}", value, aim))
    return rows


def file_rows() -> list[Count]:
    """The files that five typical calls visit; imports the frameworks."""
    walks = importlib.import_module("walks")
    return [Count(f"files of {name}", len(x), walks.WALKS[name][1]) for name, x in walks.files_entered().items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--walks", action="store_true", help="measure only the walks")
    parser.add_argument("--check", action="store_true", help="exit with status 1 if an aim is missed")
    chosen = parser.parse_args()
    rows = [*([] if chosen.walks else counts()), *walk_rows(), *([] if chosen.walks else file_rows())]
    for row in rows:
        aim = "" if row.aim is None else f"aim {row.aim:>7,}  {'' if row.value <= row.aim else 'missed'}"
        print(f"{row.value:>8,}  {row.name:68} {aim}".rstrip())
    return int(chosen.check and any(row.aim is not None and row.value > row.aim for row in rows))


if __name__ == "__main__":
    sys.exit(main())
