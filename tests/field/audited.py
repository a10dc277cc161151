"""Compiles and audits the steps of harnesses for one target: ``python -m tests.field.audited TARGET HARNESS ...``.

A step of four microbatches is compiled with its batch sharded over all devices and its parameters replicated, as in
data parallel training; TARGET is ``here`` or a name that ``gradcombine audit --target`` takes. Prints lines of
JSON, and writes each program to the folder that FIELD_HLO names. Set ``JAX_PLATFORMS=cpu`` and, for arrays that are
worth an audit, ``FIELD_SIZES=1024,128,128``.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gradcombine.audit import audit
from gradcombine.audit.target import find_target
from tests.field.run import MICROBATCHES


def audited(harness: str, name: str) -> dict[str, Any]:
    """The findings and exchanges of a harness's step."""
    module: Any = import_module(f"tests.field.{harness}")
    target = find_target(None if name == "here" else name)
    mesh = module.MESH = jax.sharding.Mesh(np.array(target.devices), ("data",))
    case = module.make_case()

    def placed(tree: Any, *axes: str) -> Any:
        sharding = jax.NamedSharding(mesh, jax.P(*axes))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    step = case["make_step"](MICROBATCHES)
    step = step if hasattr(step, "lower") else jax.jit(step)
    row = {"harness": harness, "package": module.PACKAGE, "version": version(module.PACKAGE), "target": name}
    try:
        compiled = step.lower(placed(case["params"]), placed(case["batch"], "data")).compile()
        report = audit(compiled, target=target)
    except Exception as error:  # of a package
        return row | {"problem": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    if folder := os.environ.get("FIELD_HLO"):
        (Path(folder) / f"{harness} {row['version']} {name}.txt").write_text(compiled.as_text())
    found = [f"{x.name}: {x.what} ({x.source}; {x.times} times)" for x in report.findings]
    exchanges = Counter[str]()
    for x in report.exchanges:
        exchanges[str(x)] += x.times
    return row | {"findings": found, "exchanges": exchanges, "sent": report.sent, "unread": report.unread}


if __name__ == "__main__":
    for each in sys.argv[2:]:
        print(json.dumps(audited(each, sys.argv[1])), flush=True)
