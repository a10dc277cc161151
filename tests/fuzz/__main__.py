"""``python -m tests.fuzz``: fuzzes every reader of files with damaged files.

Exit status: 0 if all files were accepted or rejected with the right error, else 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter

from tests.fuzz.campaign import campaign, work


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="for each reader")
    parser.add_argument("--seed", type=int, default=0, help="file i of a reader is made of the seed, its name and i")
    parser.add_argument("--seconds", type=float, default=3600, help="at most for each reader")
    parser.add_argument("--only", default="", help="readers in whose name this pattern is found")
    parser.add_argument("--from-name", help=argparse.SUPPRESS)
    parser.add_argument("--from-input", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    if options.from_name is not None:
        place = options.from_name, options.from_input
        work(options.inputs, options.seed, options.only, options.seconds, *place)
        return 0
    total: Counter[str] = Counter()
    for result in campaign(options.inputs, options.seed, options.only, options.seconds):
        total.update(result.counts)
        counts = ", ".join(f"{n:,} {kind}" for kind, n in sorted(result.counts.items()))
        print(f"{result.name:48}{counts} ({result.seconds:.0f} s)", flush=True)
        for what, (times, inputs) in sorted(result.defects.items(), key=lambda item: -item[1][0]):
            print(f"    {times:,}: {what}: files {', '.join(map(str, inputs))}", flush=True)
    print(f"{sum(total.values()):,} files: " + ", ".join(f"{n:,} {kind}" for kind, n in sorted(total.items())))
    return 1 if total["defect"] else 0


if __name__ == "__main__":
    sys.exit(main())
