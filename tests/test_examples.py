"""Every example runs in a separate process, prints its documented output, and compiles steps without audit findings."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SHOWS = {
    "adapters_by_request.py": r"117 requests, of which 81 were needed\n(.*3 updates, same bits as in order\n){3}",
    "aggregation_method.py": r"ADD_N +│ blocks of eight(.*\n)*.*EXPERIMENTAL_TREE +│ left chain(.*\n)*"
    r".*tree +│ canonical tree",
    "cross_framework.py": r"same bits: True\nwithout token counts: off by up to 0\.\d+",
    "grpo.py": r"192 sequences in \d+ rows, of which 164 sequences are informative\n(.* off by (0e\+00|\de-0[67])\n){3}"
    r"a mean over 8 microbatches +off by [5-9]e-02",
    "jax_multi_process.py": r"process 0 of 2: loss .*\n(.*\n)*same bits: True",
    "keras_fit.py": r"one batch +loss (0\.\d+) after 87 updates\nAccumulate +loss \1 after 87 updates\n"
    r"Keras .* after 84 updates",
    "nnx_language_model.py": r"resumed: the window holds the microbatches \[0, 1\]\n"
    r"loss 4\.\d+ -> 0\.9\d in 40 updates\nfour microbatches in a scan +off by \de-0[56]\n"
    r"mean of means +off by \de-01\nfour requests +off by \de-0[56]\n",
    "optax_chain.py": r"before +loss 2\.\d+\n(.*\n)*epoch 4 +loss 0\.[0-4]\d+ +\d+ updates",
    "port_tf_to_jax.py": r"as ported: step 0: introduced by the combine.*\nwith the microbatches' weights: "
    r"step 0: introduced by the optimizer.*\nwith the epsilon of Keras: 6 windows agree\n",
    "port_torch_to_flax.py": r"as ported: 9 of 11 leaves have the same bits\n"
    r" +attention\.q_proj_weight resembles params/attention/key/kernel\n"
    r" +attention\.k_proj_weight resembles params/attention/query/kernel\n +step 0: introduced by the gradients.*\n"
    r"fixed: 11 of 11 leaves have the same bits\n +3 steps agree\n",
    "resume_across_frameworks.py": r"saved the states of 'mean' on 4 replicas.*\n10 more calls on two replicas; "
    r"the window is full: True\nequal bits: True",
    "scan_text.py": r"sentences of 2 to 64 words\nmean over tokens +gradient off by \d\.\de-0[5-9], .*\n"
    r"mean of means +gradient off by [1-9]\.\de-01, .*",
    "several_denominators.py": r"one batch 7\.398\d, mean of means 7\.870\d\n"
    r"JAX, totals unknown +gradient off by \d\.\de-0[78]\n"
    r"JAX, totals counted +gradient off by \d\.\de-0[78]\nTensorFlow +gradient off by \d\.\de-0[78]\n"
    r"mean of means +gradient off by 7\.\de-01\n",
    "survive_faults.py": r"restarted 1 time, loss 0\.1294\nsame bits: True",
    "tf_strategies.py": r"none +loss 0\.775\d +accuracy 0\.\d+",
    "tf_function_step.py": r"epoch 1: loss 2\.\d+ -> .*\n(.*\n)*epoch 5: .* -> 0\.[0-4]\d+\n.* steps, 1 trace",
    "migrate_jax.py": r"MultiSteps +1e-01 +\de-08\n.*same numbers +1e-01 +1e-01\noptax.microbatch +4e-02 +\de-08\n"
    r"a hand-written scan +1e-01 +\de-08\nnum_items_in_batch +\de.0[08] +\de-08\nMaxText +\de-08 +\de-08\n",
    "migrate_tensorflow.py": r"(.* +1e-01 +\de-08\n){3}",
}


ARGUMENTS = {"tf_strategies.py": ["none"]}
"""Command lines; without one, tf_strategies.py runs all strategies, which takes minutes."""


def needing(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.needs("torch")] if "torch" in name else []) for name in names]


AUDITED = (
    "adapters_by_request.py",
    "jax_multi_process.py",
    "keras_fit.py",
    "nnx_language_model.py",
    "optax_chain.py",
    "port_tf_to_jax.py",
    "port_torch_to_flax.py",
    "resume_across_frameworks.py",
    "scan_text.py",
    "several_denominators.py",
    "survive_faults.py",
    "tf_function_step.py",
    "tf_strategies.py",
    "migrate_jax.py",
)
"""Examples that compile a step."""

BESIDES: dict[str, Callable[[dict[str, Any]], object]] = {
    "jax_multi_process.py": lambda example: example["train"](1, 0),
    "survive_faults.py": lambda example: example["train"](tempfile.mkdtemp(), 1, 0, [0]),
    "tf_strategies.py": lambda example: example["replicated"](example["make_strategy"]("mirrored_2")),
}
"""Calls of functions whose steps the script compiles in another process or not at all, so that they are audited."""

IMPORTED = ("jax", "optax", "flax.linen", "tensorflow", "keras", "sklearn.datasets", "gradcombine.audit")
"""Modules that take longer to import than most examples to run: imported once, by the fork server."""


def run_and_audit(name: str, printed: Path, judged: Path) -> None:
    """Runs the script as ``__main__`` with its output in ``printed``; writes the audit of its steps to ``judged``."""
    import jax
    import tensorflow as tf

    from gradcombine.audit import audit
    from tests.recorded_steps import recording, shapes

    with printed.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    script = ROOT / "examples" / name
    sys.argv = [str(script), *ARGUMENTS.get(name, [])]
    sys.path.insert(0, str(script.parent))
    with recording(jax, "jit", shapes) as jitted, recording(tf, "function", lambda args: args) as traced:
        example = runpy.run_path(str(script), run_name="__main__")
        sys.stdout.flush()
        if name in BESIDES:
            BESIDES[name](example)
    called = [x for x in (*jitted, *traced) if x.args is not None] if name in AUDITED else []
    reports = [audit(x.function, *x.args) for x in called]
    findings = [str(finding) for report in reports for finding in report.findings]
    exchanges = sum(len(report.exchanges) for report in reports)
    judged.write_text(json.dumps({"reports": len(reports), "findings": findings, "exchanges": exchanges}))


@pytest.fixture(scope="session")
def forking() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


@pytest.mark.full
@pytest.mark.needs("jax", "tensorflow", "optax", "keras", "flax", "sklearn")
@pytest.mark.parametrize("name", needing(path.name for path in sorted((ROOT / "examples").glob("*.py"))))
def test_an_example_runs_and_what_it_compiles_is_clean(name: str, forking: Any, tmp_path: Path) -> None:
    printed, judged = tmp_path / "printed", tmp_path / "judged"
    process = forking.Process(target=run_and_audit, args=(name, printed, judged))
    process.start()
    process.join(300)
    process.kill()
    output = printed.read_text()
    assert process.exitcode == 0, output
    assert re.search(SHOWS[name], output), output
    report = json.loads(judged.read_text())
    assert report["findings"] == []
    assert bool(report["reports"]) == (name in AUDITED)
    if name in AUDITED and name.startswith("tf_"):
        # Once a window: kernel and bias of two layers, and the metrics.
        assert report["exchanges"] >= 4


@pytest.mark.slow
@pytest.mark.needs("tensorflow", "sklearn")
def test_every_strategy_trains_alike() -> None:
    script = [sys.executable, str(ROOT / "examples" / "tf_strategies.py")]
    done = subprocess.run(script, capture_output=True, text=True, check=False, timeout=900, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^\w+ +loss 0\.775\d +accuracy 0\.830$", done.stdout, re.M)) >= 9, done.stdout
