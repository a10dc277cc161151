"""Which leaf of one dump is which leaf of another, across the naming conventions of frameworks."""

from gradcombine.verify.mapping.match import Matching, Pair, match
from gradcombine.verify.mapping.rules import Rules, read_rules

__all__ = ["Matching", "Pair", "Rules", "match", "read_rules"]
