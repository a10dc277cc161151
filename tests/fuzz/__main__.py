"""``python -m tests.fuzz``: hostile inputs to every public function and every reader of files.

Exit status: 0 if all were accepted, or refused as they have to be; 1 if not.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter

from tests.fuzz.campaign import ROOMS, campaign, work


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="for each name; of the rooms of frameworks a part")
    parser.add_argument("--seed", type=int, default=0, help="input i of a name is made of the seed, the name and i")
    parser.add_argument("--seconds", type=float, default=3600, help="at most for each name, whose inputs end there")
    parser.add_argument("--only", default="", help="names in which this pattern is found")
    parser.add_argument("--room", choices=list(ROOMS), action="append", help="one of the rooms; by default all")
    parser.add_argument("--from-name", help=argparse.SUPPRESS)
    parser.add_argument("--from-input", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    os.environ["JAX_TRACEBACK_FILTERING"] = "off"  # which takes longer than most refusals
    if options.from_name is not None:
        place = options.from_name, options.from_input
        work(options.room[0], options.inputs, options.seed, options.only, options.seconds, *place)
        return 0
    total: Counter[str] = Counter()
    for result in campaign(options.inputs, options.seed, options.only, tuple(options.room or ROOMS), options.seconds):
        total.update(result.counts)
        counts = ", ".join(f"{n:,} {kind}" for kind, n in sorted(result.counts.items()))
        print(f"{result.room:17}{result.name:48}{counts} ({result.seconds:.0f} s)", flush=True)
        for what, (times, inputs) in sorted(result.defects.items(), key=lambda item: -item[1][0]):
            print(f"    {times:,}: {what}: inputs {', '.join(map(str, inputs))}", flush=True)
    print(f"{sum(total.values()):,} inputs: " + ", ".join(f"{n:,} {kind}" for kind, n in sorted(total.items())))
    return 1 if total["defect"] else 0


if __name__ == "__main__":
    sys.exit(main())
