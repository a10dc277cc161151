"""Files of arrays, read leaf by leaf and piece by piece. Each format's library is imported as such a file is met."""

from gradcombine.verify.dumps.entry import Dump, Entry
from gradcombine.verify.dumps.open import open_dump

__all__ = ["Dump", "Entry", "open_dump"]
