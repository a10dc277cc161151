"""Harnesses of packages that the default environment does not have are for ``nox -s field`` alone."""

collect_ignore = ["jax_privacy_clipped.py", "maxtext_balance.py", "tunix_sft.py"]
