"""Rules written by hand, for what no name and no value can tell."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from gradcombine.errors import GradCombineError


class Rule(NamedTuple):
    """One line of a rules file.

    Attributes:
      pattern: matches whole names of the first dump.
      template: the name in the second one, with ``\\1`` for groups; None to leave the leaf out.
      transpose: the axes of the second leaf that make the first one's; None to find out.
    """

    pattern: re.Pattern[str]
    template: str | None
    transpose: tuple[int, ...] | None


class Rules(NamedTuple):
    """Rules by priority: the first that matches a name decides.

    Attributes:
      rules: those for names of the first dump.
      ignored: patterns of names of the second dump that need no counterpart.
    """

    rules: tuple[Rule, ...] = ()
    ignored: tuple[re.Pattern[str], ...] = ()

    def find(self, name: str) -> tuple[Rule, str | None] | None:
        """The rule for a name of the first dump, and the name in the second."""
        for rule in self.rules:
            found = rule.pattern.fullmatch(name)
            if found is not None:
                return rule, None if rule.template is None else _expanded(rule.template, found)
        return None

    def ignores(self, name: str) -> bool:
        return any(pattern.fullmatch(name) for pattern in self.ignored)


NO_RULES = Rules()


def read_rules(path: str | Path) -> Rules:
    r"""Rules from a TOML file.

    ::

        ignore_a = ["optimizer/.*"]              # leaves that need no counterpart
        ignore_b = ["step"]

        [[rule]]
        a = 'layers/(\d+)/vars/0'                # a regular expression for whole names of A
        b = 'params/Dense_\1/kernel'             # the name in B
        transpose = [1, 0]                       # A is B with its axes in this order (if left out: found out)

    Raises:
      GradCombineError: for a file that is not such rules, naming the rule.
    """
    try:
        content = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise GradCombineError("diff", f"a TOML file of rules at {path}", str(error)) from None
    if not isinstance(content.get("rule", []), list):
        raise GradCombineError("diff", "rules as [[rule]]", repr(content["rule"]))
    unknown = set(content) - {"ignore_a", "ignore_b", "rule"}
    if unknown:
        raise GradCombineError("diff", "ignore_a, ignore_b and [[rule]] in the rules", ", ".join(sorted(unknown)))
    rules = [Rule(pattern, None, None) for pattern in _patterns(content.get("ignore_a", []))]
    rules += [_rule(entry, number) for number, entry in enumerate(content.get("rule", []), 1)]
    return Rules(tuple(rules), tuple(_patterns(content.get("ignore_b", []))))


def _rule(entry: Any, number: int) -> Rule:
    if not isinstance(entry, dict) or not {"a", "b"} <= set(entry) <= {"a", "b", "transpose"}:
        raise GradCombineError("diff", f"rule {number} with a, b and perhaps transpose", repr(entry))
    (pattern,) = _patterns([entry["a"]])
    axes = entry.get("transpose")
    if axes is not None and not (isinstance(axes, list) and set(axes) == set(range(len(axes)))):
        raise GradCombineError("diff", f"rule {number} with transpose as an order of axes", axes)
    if not isinstance(entry["b"], str):
        raise GradCombineError("diff", f"rule {number} with a name as b", repr(entry["b"]))
    return Rule(pattern, entry["b"], None if axes is None else tuple(axes))


def _expanded(template: str, found: re.Match[str]) -> str:
    try:
        return found.expand(template)
    except (re.error, IndexError) as error:
        raise GradCombineError("diff", "a name with groups of its rule", f"{template!r}: {error}", found[0]) from None


def _patterns(texts: Any) -> Iterable[re.Pattern[str]]:
    if not isinstance(texts, list):
        raise GradCombineError("diff", "a list of regular expressions in the rules", repr(texts))
    for text in texts:
        try:
            yield re.compile(text)
        except (re.error, TypeError) as error:
            raise GradCombineError("diff", "a regular expression in the rules", f"{text!r}: {error}") from None
