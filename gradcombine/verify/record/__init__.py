"""Step-by-step records of a run, as arrays or digests, and the first difference between two runs."""
