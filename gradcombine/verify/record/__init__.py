"""Records of a run, step by step: traces, digests, and the first difference of two runs."""
