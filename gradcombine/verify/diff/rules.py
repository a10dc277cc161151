"""Rules that say which leaves of two dumps correspond, and which need no counterpart."""

from __future__ import annotations

import re
import signal
import threading
import tomllib
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

from gradcombine.errors import invalid, operation, require_file, shown


class Rule(NamedTuple):
    """One rule of a rules file.

    Attributes:
      pattern: matches full names of the first dump.
      template: the name in the second dump, with ``\\1`` for groups; None to ignore the leaf.
      transpose: the order of the second leaf's axes that gives the first leaf; None to determine it from the values.
    """

    pattern: re.Pattern[str]
    template: str | None
    transpose: tuple[int, ...] | None


class Rules(NamedTuple):
    """Rules by priority: the first that matches a name applies.

    Attributes:
      rules: for names of the first dump.
      ignored: patterns for names of the second dump that need no counterpart.
    """

    rules: tuple[Rule, ...] = ()
    ignored: tuple[re.Pattern[str], ...] = ()

    def find(self, name: str) -> tuple[Rule, str | None] | None:
        """The rule for a name of the first dump, and the name in the second; None without a rule."""
        for rule in self.rules:
            with _in_time(rule.pattern.pattern, name):
                matched = rule.pattern.fullmatch(name)
            if matched is not None:
                return rule, None if rule.template is None else _expanded(rule.template, matched)
        return None

    def ignores(self, name: str) -> bool:
        for pattern in self.ignored:
            with _in_time(pattern.pattern, name):
                if pattern.fullmatch(name):
                    return True
        return False


SECONDS = 1.0
"""Time limit for compiling a pattern and for matching it with a name. Both usually take less than a millisecond."""


@contextmanager
def _in_time(pattern: object, name: str = "") -> Generator[None]:
    """Raises if the body, which compiles or matches the pattern, takes longer than `SECONDS`.

    Uses a signal, as a match holds the interpreter's lock, so there is no limit outside of the main thread and on
    Windows.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def over(*_: Any) -> None:
        raise invalid(f"a regular expression that takes less than {SECONDS:g} s", shown(pattern), name)

    handler, timer = signal.signal(signal.SIGALRM, over), signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)


NO_RULES = Rules()


@operation("diff")
def read_rules(path: str | Path) -> Rules:
    r"""Reads rules from a TOML file.

    ::

        ignore_a = ["optimizer/.*"]              # leaves that need no counterpart
        ignore_b = ["step"]

        [[rule]]
        a = 'layers/(\d+)/vars/0'                # a regular expression that matches full names in A
        b = 'params/Dense_\1/kernel'             # the name in B
        transpose = [1, 0]                       # A is B with its axes in this order; by default from the values

    Raises:
      GradCombineError: for a file that does not contain such rules. The error names the rule.
    """
    file = require_file("a TOML file of rules", path)
    try:
        content = tomllib.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:  # unreadable, not text, not TOML, or nested too deeply
        raise invalid(f"a TOML file of rules at {path}", str(error)) from None
    if set(content) - {"ignore_a", "ignore_b", "rule"} or not isinstance(content.get("rule", []), list):
        raise invalid("rules as ignore_a, ignore_b and [[rule]]", shown(content))
    rules = [Rule(pattern, None, None) for pattern in _patterns(content.get("ignore_a", []))]
    rules += [_rule(entry, number) for number, entry in enumerate(content.get("rule", []), 1)]
    return Rules(tuple(rules), tuple(_patterns(content.get("ignore_b", []))))


def _rule(content: Any, number: int) -> Rule:
    match content:
        case {"a": a, "b": str(b), **others} if not set(others) - {"transpose"}:
            axes = cast("list[Any]", others.get("transpose", []))
            if type(axes) is list and all(type(n) is int for n in axes) and sorted(axes) == [*range(len(axes))]:
                return Rule(next(iter(_patterns([a]))), b, tuple(axes) if "transpose" in others else None)
        case _:
            pass
    raise invalid(f"rule {number} with a, a name as b, and optionally transpose, an order of axes", shown(content))


def _expanded(template: str, matched: re.Match[str]) -> str:
    try:
        return matched.expand(template)
    except (re.error, IndexError) as error:
        raise invalid("a name that uses only groups of its rule", f"{template!r}: {error}", matched[0]) from None


def _patterns(content: Any) -> Iterable[re.Pattern[str]]:
    if not isinstance(content, list):
        raise invalid("a list of regular expressions in the rules", repr(content))
    for text in cast("list[Any]", content):
        try:
            with _in_time(text):
                pattern = re.compile(text)
        except (re.error, TypeError, OverflowError, RecursionError) as error:
            raise invalid("a regular expression in the rules", f"{text!r}: {error}") from None
        yield pattern
