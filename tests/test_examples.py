"""Every example runs as a script of its own and prints what it shows."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SHOWS = {
    "aggregation_method.py": r"ADD_N +│ blocks of eight(.*\n)*.*EXPERIMENTAL_TREE +│ left chain(.*\n)*"
    r".*tree +│ canonical tree",
    "cross_framework.py": r"same bits: True\nwithout token counts: off by up to 0\.\d+",
    "jax_multi_process.py": r"process 0 of 2: loss .*\n(.*\n)*same bits: True",
    "keras_fit.py": r"one batch +loss (0\.\d+) after 87 updates\nAccumulate +loss \1 after 87 updates\n"
    r"Keras .* after 84 updates",
    "optax_chain.py": r"before +loss 2\.\d+\n(.*\n)*epoch 4 +loss 0\.[0-4]\d+ +\d+ updates",
    "port_tf_to_jax.py": r"as ported: step 0: introduced by the combine.*\nwith the microbatches' weights: "
    r"step 0: introduced by the optimizer.*\nwith the epsilon of Keras: 6 windows agree\n",
    "port_torch_to_flax.py": r"as ported: 9 of 11 leaves have the same bits\n"
    r" +attention\.q_proj_weight is like params/attention/key/kernel\n"
    r" +attention\.k_proj_weight is like params/attention/query/kernel\n +step 0: introduced by the gradients.*\n"
    r"mended: 11 of 11 leaves have the same bits\n +3 steps agree\n",
    "resume_across_frameworks.py": r"saved: states of 'mean' on 4 replicas.*\n10 more calls on two replicas; "
    r"the window is full: True\nequal bits: True",
    "scan_text.py": r"sentences of 2 to 64 words\nmean over tokens +gradient off by \d\.\de-0[5-9], .*\n"
    r"mean of means +gradient off by [1-9]\.\de-01, .*",
    "several_denominators.py": r"in one piece 7\.398\d, mean of means 7\.870\d\n"
    r"JAX, totals unknown +gradient off by \d\.\de-0[78]\n"
    r"JAX, totals counted +gradient off by \d\.\de-0[78]\nTensorFlow +gradient off by \d\.\de-0[78]\n"
    r"mean of means +gradient off by 7\.\de-01\n",
    "tf_strategies.py": r"none +loss 0\.775\d +accuracy 0\.\d+",
    "tf_function_step.py": r"epoch 1: loss 2\.\d+ -> .*\n(.*\n)*epoch 5: .* -> 0\.[0-4]\d+\n.* steps, 1 trace",
    "ways_over_jax.py": r"MultiSteps +1e-01 +\de-08\n.*same numbers +1e-01 +1e-01\noptax.microbatch +4e-02 +\de-08\n"
    r"a scan by hand +1e-01 +\de-08\nnum_items_in_batch +\de.0[08] +\de-08\nMaxText +\de-08 +\de-08\n",
    "ways_over_tensorflow.py": r"(.* +1e-01 +\de-08\n){3}",
}


ARGUMENTS = {"tf_strategies.py": ["none"]}
"""Without an argument it runs all strategies, which takes minutes."""


def needing(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.needs("torch")] if "torch" in name else []) for name in names]


@pytest.mark.full
@pytest.mark.needs("jax", "tensorflow", "optax", "keras", "flax", "sklearn")
@pytest.mark.parametrize("name", needing(path.name for path in sorted((ROOT / "examples").glob("*.py"))))
def test_an_example_runs(name: str) -> None:
    script = [sys.executable, str(ROOT / "examples" / name), *ARGUMENTS.get(name, [])]
    done = subprocess.run(script, capture_output=True, text=True, check=False, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert re.search(SHOWS[name], done.stdout), done.stdout


AUDITED: dict[str, Callable[[Any], object]] = {
    "jax_multi_process.py": lambda example: example.train(1, 0),
    "keras_fit.py": lambda example: example.main(),
    "optax_chain.py": lambda example: example.main(),
    "port_tf_to_jax.py": lambda example: example.main(),
    "port_torch_to_flax.py": lambda example: example.main(),
    "resume_across_frameworks.py": lambda example: example.main(),
    "scan_text.py": lambda example: example.main(),
    "several_denominators.py": lambda example: example.main(),
    "tf_function_step.py": lambda example: example.main(epochs=1),
    "tf_strategies.py": lambda example: example.replicated(example.made("mirrored_2")),
    "ways_over_jax.py": lambda example: example.main(),
}
"""Those that compile a step."""


@pytest.mark.full
@pytest.mark.needs("jax", "tensorflow", "optax", "keras", "flax", "sklearn")
@pytest.mark.parametrize("name", needing(AUDITED))
def test_what_an_example_compiles_is_clean(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import jax
    import tensorflow as tf

    from gradcombine.verify.audit import audit
    from tests.recorded_steps import recording, shapes

    spec: Any = importlib.util.spec_from_file_location(f"example_{name[:-3]}", ROOT / "examples" / name)
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, example)
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "EPOCHS", 1, raising=False)
    # The tests' own settings of JAX are stricter than a script's.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        with recording(jax, "jit", shapes) as jitted, recording(tf, "function", lambda args: args) as traced:
            AUDITED[name](example)
        reports = [audit(x.function, *x.args) for x in (*jitted, *traced) if x.args is not None]
    assert reports
    assert [finding for report in reports for finding in report.findings] == []
    if name.startswith("tf_"):
        # Once a window, and nothing beside it: the kernel and the bias of two layers, and what the metrics need.
        assert sum(len(report.exchanges) for report in reports) >= 4


@pytest.mark.slow
@pytest.mark.needs("tensorflow", "sklearn")
def test_every_strategy_trains_alike() -> None:
    script = [sys.executable, str(ROOT / "examples" / "tf_strategies.py")]
    done = subprocess.run(script, capture_output=True, text=True, check=False, timeout=900, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^\w+ +loss 0\.775\d +accuracy 0\.830$", done.stdout, re.M)) >= 9, done.stdout
