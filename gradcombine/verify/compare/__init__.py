"""How far apart two trees of arrays are, to the bit, and from a reference."""
