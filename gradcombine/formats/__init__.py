"""File formats of named arrays: written whole, read piece by piece, and trusted in nothing that can be checked."""

from gradcombine.formats.entry import Entry, from_array, from_blocks, from_pieces, unread

__all__ = ["Entry", "from_array", "from_blocks", "from_pieces", "unread"]
