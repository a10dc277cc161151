"""``python -m tests.faults``: runs the fault campaign."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import warnings

CACHE = tempfile.TemporaryDirectory(prefix="gradcombine-faults-cache-")
"""JAX's compilation cache, shared by the hundreds of processes."""
os.environ.update(
    JAX_PLATFORMS="cpu",
    XLA_FLAGS="--xla_backend_optimization_level=1",
    JAX_COMPILATION_CACHE_DIR=CACHE.name,
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    CUDA_VISIBLE_DEVICES="",
    TF_CPP_MIN_LOG_LEVEL="3",
)

from tests.faults.campaign import run_campaign  # noqa: E402 (frameworks read these as they are imported)
from tests.faults.plants import IN_LIBRARY, IN_TRAINING  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="Runs that faults are drawn for.")
    parser.add_argument("--runs", type=int, default=100, help="of each engine")
    parser.add_argument("--engine", choices=("jax", "tensorflow", "both"), default="both")
    parser.add_argument("--seed", type=int, help="of all that is drawn; printed")
    parser.add_argument("--first", type=int, default=0, help="the number of the first run: draws one run once more")
    parser.add_argument(
        "--plant",
        choices=(*IN_TRAINING, *IN_LIBRARY),
        default="",
        help="a defect, which the campaign has to find: it ends at the first run that does, with the status 1",
    )
    parser.add_argument("--limit", type=float, default=180, help="seconds for a run")
    parser.add_argument("--patience", type=float, default=8, help="seconds without progress that are a hang")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    # Processes are forked from one that has imported the frameworks but not started them.
    warnings.filterwarnings("ignore", message=".*fork", category=RuntimeWarning)
    warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
    engines = ("jax", "tensorflow") if args.engine == "both" else (args.engine,)
    campaigns = [run_campaign(x, args.first, args.runs, seed, args.plant, args.limit, args.patience) for x in engines]
    print(*campaigns, f"seed {seed}", sep="\n")
    return 0 if all(campaign.is_good for campaign in campaigns) else 1


if __name__ == "__main__":
    sys.exit(main())
