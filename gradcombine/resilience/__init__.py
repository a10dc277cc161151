"""Runs whose processes die: which microbatches a window holds, and what is wrong with a replica."""
