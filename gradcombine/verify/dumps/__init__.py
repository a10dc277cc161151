"""Files and checkpoints of arrays. Each format's library is imported as such a file is met."""

from gradcombine.formats import Entry
from gradcombine.verify.dumps.open import Dump, open_dump

__all__ = ["Dump", "Entry", "open_dump"]
