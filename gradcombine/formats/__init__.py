"""File formats of named arrays. Readers load arrays lazily, and treat every file as untrusted."""

from gradcombine.formats.entry import Entry, from_array, from_blocks, from_pieces, unread

__all__ = ["Entry", "from_array", "from_blocks", "from_pieces", "unread"]
