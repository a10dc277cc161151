"""Sessions in separate environments, created by uv: tests with other versions, each extra alone, and distributions.

``nox -l`` lists the sessions: ``versions`` runs the quick tests with the lowest, default and newest versions,
``distributions`` builds, checks and installs wheel and sdist, ``field`` and ``field_audit`` check released packages,
and ``ratios`` repeats the benchmarks. Arguments after ``--`` are passed on.
"""

from __future__ import annotations

import re
import textwrap
import zipfile
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv"
nox.options.sessions = ["distributions"]

FRAMEWORKS = "jax,tensorflow,optax,keras,flax,equinox,orbax,safetensors,sklearn"

VERSIONS = {
    # The minimum versions of pyproject.toml, with the newest test dependencies that are compatible with them.
    "lowest": (
        "3.11",
        ("jax==0.9.1", "optax==0.2.8", "tensorflow==2.19.0", "keras==3.12.0", "numpy==2.0.2", "ml_dtypes==0.5.1"),
    ),
    "default": ("3.11", ()),
    "newest, Python 3.12": ("3.12", ()),
    "newest": ("3.13", ()),
}
"""Python version and pinned packages, by name."""

ALONE = {
    "": ("numpy", ("jax", "tensorflow", "typer")),
    "jax": ("jax", ("tensorflow", "keras", "optax", "typer")),
    "optax": ("optax", ("tensorflow", "keras", "typer")),
    "tensorflow": ("tensorflow", ("jax", "optax", "typer")),
    "keras,tensorflow": ("keras", ("jax", "optax", "typer")),
    "cli": ("cli", ("jax", "tensorflow", "keras", "optax")),
    "cli,jax": ("check", ("tensorflow", "keras", "optax", "matplotlib")),
}
"""By extra: the program in `PROGRAMS` that must run with it alone, and the modules that must be absent."""

PROGRAMS = {
    "numpy": """
        import numpy as np
        import gradcombine.statefile, gradcombine.verify
        gradients = [np.float32([1, 2]), np.float32([4, 8])]
        exact = gc.reductions.mean("exact")
        acc = gc.accumulate(exact, every=2)
        gc.statefile.save("half.npz", exact, acc.update(gradients[0], acc.init(gradients[0]), 30))
        half = gc.statefile.load("half.npz", exact, gradients[0])
        full = acc.update(gradients[1], half, weight=10)
        assert (acc.value(full) == [1.75, 3.5]).all()
    """,
    "jax": """
        import jax.numpy as jnp
        from gradcombine.integrations.jax import value_and_grad
        assert value_and_grad(lambda w, x: (w * x).mean(), 2)(jnp.float32(2), jnp.arange(4.0))[1] == 1.5
    """,
    "optax": """
        import jax.numpy as jnp, optax
        from gradcombine.integrations.jax import train_step
        from gradcombine.integrations.optax import accumulate
        step = train_step(lambda w, x: ((w - x) ** 2).mean(), optax.sgd(0.5), microbatches=2)
        w = jnp.zeros(())
        assert step(w, step.init(w), jnp.arange(4.0))[0] == 1.5
        assert accumulate(optax.sgd(0.5), every=2)
    """,
    "tensorflow": """
        import tensorflow as tf
        from gradcombine.integrations.horovod import AllReduce
        from gradcombine.integrations.tensorflow import AccumulatedStep
        w = tf.Variable([0.0])
        step = AccumulatedStep(lambda x: ([x], 1), [w], lambda g, v: v[0].assign_sub(g[0]), every=2)
        for x in (1.0, 3.0):
            tf.function(step)(tf.constant([x]))
        assert w.numpy() == -2
    """,
    "keras": """
        import keras, numpy as np
        from gradcombine.integrations.keras import Accumulate
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(Accumulate(keras.optimizers.SGD(0.1), every=2), "mse")
        model.fit(np.ones((8, 1)), np.ones(8), batch_size=2, verbose=0)
        assert model.optimizer.iterations == 2
    """,
    "cli": """
        import numpy as np, subprocess
        np.savez("a.npz", w=np.float32([1, 2])), np.savez("b.npz", w=np.float32([1, 3]))
        command = [os.path.join(os.path.dirname(sys.executable), "gradcombine"), "diff", "a.npz"]
        assert [subprocess.run([*command, f"{b}.npz"]).returncode for b in "ab"] == [0, 1]
    """,
    # Runs the listing of docs/check.md and compares the output with the page.
    "check": """
        import pathlib, re, subprocess
        page = (pathlib.Path({root!r}) / "docs" / "check.md").read_text()
        pathlib.Path("steps.py").write_text(re.search("```python\\n(.*?)```", page, re.S)[1])
        shown = re.search("```console\\n(.*?)```", page, re.S)[1].split()
        command = [os.path.join(os.path.dirname(sys.executable), *shown[1:2]), *shown[2:4]]
        done = subprocess.run(command, env={{**os.environ, "COLUMNS": "89"}}, capture_output=True, text=True)
        assert done.returncode == 1 and done.stdout.split()[: len(shown[4:])] == shown[4:], done
    """,
}

TUNIX = "flax optax google-metrax jaxtyping tqdm huggingface_hub sentencepiece pillow perfetto pandas orbax-checkpoint"
MAXTEXT = """
    flax optax jinja2 packaging fastapi requests uvicorn immutabledict xprof jaxtyping einshape tqdm omegaconf grain
    drjax huggingface_hub transformers pillow tiktoken sentencepiece sympy google-cloud-logging google-cloud-monitoring
    google-cloud-aiplatform tensorboardX orbax-checkpoint
"""
ACCELERATED = "aqtp qwix pathwaysutils tokamax ml-goodput-measurement"
TORCH, TRANSFORMERS = "torch==2.13.0", ("4.45.2", "4.46.3", "4.57.6", "5.23.0")

FIELD = {
    "jax": ("3.11", "optax==0.2.8 flax==0.12.8 equinox==0.13.8 dm-haiku==0.0.17", ""),
    "keras": ("3.11", "keras==3.15.1 tensorflow==2.21.0 jax", ""),
    "keras-hub": ("3.11", "keras-hub==0.32.0 keras==3.15.1 jax", ""),
    "privacy": ("3.11", "jax-privacy==2.0.0 flax", ""),
    "numpyro": ("3.11", "numpyro==0.22.0 optax", ""),
    "brax": ("3.11", "brax==0.14.2", ""),
    "drjax": ("3.11", "drjax==0.2.1", ""),
    "tunix": ("3.11", TUNIX, "google-tunix==0.1.7"),
    **{f"transformers {x}": ("3.11", f"{TORCH} accelerate transformers=={x}", "") for x in TRANSFORMERS},
    "trl": ("3.11", f"{TORCH} trl==1.16.0", ""),
    "easydel": ("3.11", f"{TORCH} pillow easydel==0.3.0", ""),
    **{f"maxtext {x}": ("3.12", MAXTEXT, f"maxtext=={x} {ACCELERATED}") for x in ("0.2.4", "0.2.5")},
}
"""By environment: Python version, packages, and packages installed without dependencies (those for accelerators)."""

HARNESSES = {
    "jax": (
        "optax_multi_steps",
        "optax_apply_every",
        "optax_micro_grad",
        "flax_nnx_optimizer",
        "equinox_loop",
        "haiku_loop",
    ),
    "keras": ("keras_optimizer",),
    "keras-hub": ("keras_hub_fit",),
    "privacy": ("jax_privacy_clipped",),
    "numpyro": ("numpyro_svi",),
    "brax": ("brax_replicas",),
    "drjax": ("drjax_mean", "drjax_weighted_mean"),
    "tunix": ("tunix_sft",),
    **{f"transformers {x}": ("hf_trainer",) for x in TRANSFORMERS},
    "trl": ("trl_sft",),
    "easydel": ("easydel_minibatches",),
    "maxtext 0.2.4": ("maxtext_balance",),
    "maxtext 0.2.5": ("maxtext_balance",),
}

COMPILED = ("jax", "privacy", "numpyro", "brax", "drjax", "tunix", "easydel", "maxtext 0.2.4", "maxtext 0.2.5")
"""Environments whose steps are a single JAX program."""

ABSENCE_CHECK = """
import importlib, importlib.util, os, sys
import gradcombine as gc
assert not [name for name in {absent!r} if importlib.util.find_spec(name)]
for name in ("horovod", "jax", "keras", "optax", "tensorflow"):
    try:
        importlib.import_module("gradcombine.integrations." + name)
    except ImportError as error:
        extra = {{"horovod": "tensorflow"}}.get(name, name)
        assert name not in {extras!r} and f"pip install 'gradcombine[{{extra}}]'" in str(error), error
"""


@nox.session(python=False)
@nox.parametrize("name", list(VERSIONS))
def versions(session: nox.Session, name: str) -> None:
    """Runs pytest, by default the quick tests, with these versions."""
    python, pins = VERSIONS[name]
    environment = Path(session.create_tmp()) / name
    interpreter = environment / "bin" / "python"
    session.run("uv", "venv", "-q", "--clear", "--python", python, str(environment), external=True)
    session.run("uv", "pip", "install", "-q", "--python", str(interpreter), "-e", ".[test]", *pins, external=True)
    command = [str(interpreter), "-m", "pytest", "-q", *session.posargs]
    session.run(*command, env={"GRADCOMBINE_REQUIRE": FRAMEWORKS}, external=True)


@nox.session(python=False)
def ratios(session: nox.Session) -> None:
    """Fails if a ratio is worse than in benchmarks/ratios.json. Uses the active environment; takes minutes."""
    session.run("python", "benchmarks/gate.py", *session.posargs)


def create_environment(session: nox.Session, name: str) -> str:
    """Creates an environment of `FIELD`, and returns its interpreter."""
    python, packages, without_dependencies = FIELD[name]
    environment = Path(session.create_tmp()).absolute() / name.replace(" ", "-")
    interpreter = str(environment / "bin" / "python")
    session.run("uv", "venv", "-q", "--clear", "--python", python, str(environment), external=True)
    install = ("uv", "pip", "install", "-q", "--python", interpreter)
    session.run(*install, "-e", ".", *packages.split(), external=True)
    if without_dependencies:
        session.run(*install, "--no-deps", *without_dependencies.split(), external=True)
    return interpreter


@nox.session(python=False)
def field(session: nox.Session) -> None:
    """Checks steps of released packages in separate environments, and writes the table of docs/field.md.

    With names of environments after ``--``, updates only their rows.
    """
    rows: list[str] = []
    for name in session.posargs or FIELD:
        interpreter = create_environment(session, name)
        output = session.run(interpreter, "-m", "tests.field.run", *HARNESSES[name], external=True, silent=True)
        rows += [line for line in str(output).splitlines() if line.startswith('{"')]
    path = Path(session.create_tmp()) / "rows.json"
    path.write_text("\n".join(rows))
    session.run("python", "-m", "tests.field.table", str(path), *["--keep"] * bool(session.posargs))


@nox.session(python=False)
def field_audit(session: nox.Session) -> None:
    """Compiles the JAX steps of released packages for 8 CPUs, 8 H100s and 16 TPU chips, and prints their audits."""
    for name in session.posargs or COMPILED:
        interpreter = create_environment(session, name)
        output = session.run(interpreter, "-c", "import jax; print(jax.__version__)", external=True, silent=True)
        version = str(output).split()[-1]
        install = ("uv", "pip", "install", "-q", "--python", interpreter)
        session.run(*install, f"jax[tpu]=={version}", external=True)
        compilers = (f"jax-cuda12-plugin=={version}", f"jax-cuda12-pjrt=={version}")
        session.run(*install, "--no-deps", *compilers, external=True)
        environment = {"JAX_PLATFORMS": "cpu", "FIELD_SIZES": "1024,128,128"}
        environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
        for target in ("here", "h100:8", "v5e:4x4"):
            command = (interpreter, "-m", "tests.field.audited", target, *HARNESSES[name])
            session.run(*command, env=environment, external=True)


@nox.session(python="3.11")
def guided(session: nox.Session) -> None:
    """Runs the coverage-guided fuzzer, by default for a minute per file reader."""
    session.install("-e", ".[test]", "atheris==3.0.0")
    session.run("python", "-m", "tests.fuzz.guided", *session.posargs)


@nox.session
def distributions(session: nox.Session) -> None:
    """Builds and checks wheel and sdist, and runs one program per extra in an environment with this extra only."""
    folder = Path(session.create_tmp()) / "dist"
    session.install("build", "twine")
    session.run("python", "-m", "build", "--outdir", str(folder), ".")
    wheel, archive = next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))
    session.run("twine", "check", "--strict", str(wheel), str(archive))
    with zipfile.ZipFile(wheel) as opened:
        (metadata,) = (opened.read(name).decode() for name in opened.namelist() if name.endswith("/METADATA"))
    if dead := re.findall(r"\]\((?!https?:)[^)]*\)|<picture>", metadata):
        session.error(f"the description on PyPI would have dead links: {dead}")
    for extra, (program, absent) in ALONE.items():
        environment = Path(session.create_tmp()) / (extra.replace(",", "-") or "none")
        interpreter = str((environment / "bin" / "python").absolute())
        package = f"{wheel}[{extra}]" if extra else str(archive)
        session.run("uv", "venv", "-q", "--clear", str(environment), external=True)
        session.run("uv", "pip", "install", "-q", "--python", interpreter, package, external=True)
        check = ABSENCE_CHECK.format(absent=absent, extras=tuple(extra.split(",")))
        with session.chdir(environment):  # imports the installed package, not the checkout
            text = textwrap.dedent(PROGRAMS[program])
            code = check + (text.format(root=str(Path(__file__).parent.absolute())) if program == "check" else text)
            session.run(interpreter, "-c", code, external=True, log=False)
        session.log(f"{extra or 'no extra'}: passed without {', '.join(absent)}")
