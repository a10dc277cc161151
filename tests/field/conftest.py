"""Harnesses of packages that the default environment does not have are for ``nox -s field`` alone."""

collect_ignore = ["hf_trainer.py", "jax_privacy_clipped.py", "maxtext_balance.py", "trl_sft.py", "tunix_sft.py"]
