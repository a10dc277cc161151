"""What a leaf is called in a trace: its stage and the keys on the way to it, no two leaves alike."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

from gradcombine.errors import GradCombineError
from gradcombine.tree import Structure

LONGEST = (1 << 16) - 1 - len(".npy")
"""The bytes of a name in a ZIP archive are counted in 16 bits."""

_INDEX = re.compile(r"\[(-?\d+)\]")
_FIELD = re.compile(r"\.(\w+)")


def names(structure: Structure, stage: str) -> list[str]:
    """The names of a tree's leaves, in the order of `flatten`: ``"gradients/layer/0/w"``.

    A key is written as it is where that is plain: a word without a slash, an index, the name of a field. Any other, and
    one that reads like its neighbour (``1`` and ``"1"``), is written as in the paths that errors name: ``"['a/b']"``.

    Raises:
      GradCombineError: for two leaves of one name, and for a name that is too long.
    """
    found = list(_names(structure, stage))
    seen: set[str] = set()
    for name, path in zip(found, structure.paths(), strict=True):
        if name in seen:
            raise GradCombineError("record", "leaves that their paths tell apart", f"two that are {name}", path)
        if len(name.encode()) > LONGEST:
            raise GradCombineError("record", f"a name of {LONGEST} bytes at most", len(name.encode()))
        seen.add(name)
    return found


def _names(structure: Structure, prefix: str) -> Iterator[str]:
    if structure.rebuild is None:
        yield prefix
    plain = [_plain(key) for key in structure.keys]
    times = Counter(plain)
    for key, word, child in zip(structure.keys, plain, structure.children, strict=True):
        yield from _names(child, f"{prefix}/{word if word is not None and times[word] == 1 else key}")


def _plain(key: str) -> str | None:
    """The key without its brackets and quotes, where it cannot be taken for another one, or for several."""
    if (found := _INDEX.fullmatch(key) or _FIELD.fullmatch(key)) is not None:
        return found[1]
    if not (key.startswith(("['", '["')) and key.endswith(("']", '"]'))):
        return None
    try:
        word = ast.literal_eval(key[1:-1])
    except (SyntaxError, ValueError):
        return None
    legible = isinstance(word, str) and word.isprintable() and "/" not in word
    return word if legible and word and not word.startswith(("[", ".")) else None
