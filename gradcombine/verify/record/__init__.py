"""What a run computes, step by step: traces, digests, and where two runs differ first."""
