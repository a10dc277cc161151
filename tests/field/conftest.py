"""Collects harnesses of packages outside the default environment in ``nox -s field`` only."""

from pathlib import Path

HERE = {"equinox_loop.py", "flax_nnx_optimizer.py", "keras_optimizer.py"}
HERE |= {"optax_apply_every.py", "optax_micro_grad.py", "optax_multi_steps.py"}
OTHERS = {"conftest.py", "problem.py", "run.py", "table.py", "test_field.py"}

collect_ignore = [x.name for x in Path(__file__).parent.glob("*.py") if x.name not in HERE | OTHERS]
