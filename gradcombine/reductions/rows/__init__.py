"""Rows: arrays of which some rows are held, and reductions that hold no others."""
