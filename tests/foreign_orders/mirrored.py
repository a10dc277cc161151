"""All-reduces of a MirroredStrategy with its default operations; a program, as two such strategies break each other.

Run as ``python -m tests.foreign_orders.mirrored RANKS FILE``; writes each result's bytes into an npz file.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from tests.foreign_orders.data import normal

# Leaves per all-reduce: shapes, dtype. 64 elements of float32 on 8 ranks make chunks round up to 64 bytes.
CASES: dict[str, tuple[list[tuple[int, ...]], str]] = {
    "one chunk": ([(7,)], "float32"),
    "empty chunks": ([(64,)], "float32"),
    "full chunks": ([(3, 256)], "float32"),
    "a short chunk": ([(1001,)], "float32"),
    "several leaves": ([(50,), (3, 41), (), (700,)], "float32"),
    "float16": ([(333,)], "float16"),
    "bfloat16": ([(333,)], "bfloat16"),
    "float64": ([(333,)], "float64"),
    "int32": ([(333,)], "int32"),
}
# On 3 ranks: chunks of more than 4 MiB, which ring_alg.cc could subdivide.
LARGE: dict[str, tuple[list[tuple[int, ...]], str]] = {"large chunks": ([(3_200_000,)], "float32")}


def cases(ranks: int) -> dict[str, tuple[list[tuple[int, ...]], str]]:
    return CASES | (LARGE if ranks == 3 else {})


def trees(case: str, ranks: int) -> list[list[np.ndarray]]:
    """The list of leaves of each rank."""
    shapes, dtype = cases(ranks)[case]
    return [[normal(1, shape, dtype, seed=10 * rank + i)[0] for i, shape in enumerate(shapes)] for rank in range(ranks)]


def main(ranks: int, path: str) -> None:
    import tensorflow as tf

    (one,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(one, [tf.config.LogicalDeviceConfiguration()] * ranks)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(ranks)])

    def all_reduce(leaves: Any) -> Any:
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, leaves)

    def run(leaves: Any) -> Any:
        return strategy.run(all_reduce, args=(leaves,))

    results: dict[str, Any] = {}
    for case, values in ((case, trees(case, ranks)) for case in cases(ranks)):
        given = [
            strategy.experimental_distribute_values_from_function(
                lambda context, i=i, values=values: tf.constant(values[context.replica_id_in_sync_group][i])
            )
            for i in range(len(values[0]))
        ]
        for mode, call in {"graph": tf.function(run), "eager": run}.items():
            for i, leaf in enumerate(call(given)):
                first, *others = [x.numpy() for x in strategy.experimental_local_results(leaf)]
                assert all(other.tobytes() == first.tobytes() for other in others), "ranks differ"
                results[f"{case} {mode} {i}"] = np.frombuffer(first.tobytes(), np.uint8)
        onto_one = strategy.reduce(tf.distribute.ReduceOp.SUM, given[0], axis=None).numpy()
        results[f"{case} reduce"] = np.frombuffer(onto_one.tobytes(), np.uint8)
    np.savez(path, **results)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
