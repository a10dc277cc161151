"""Correct steps as users write them, with many losses, optimizers and statistics: JAX functions of (params, batch)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from tests.verify.steps.dividing import averaging, by_counts, in_a_scan, jitted, part, parts, plus, scaled, stacked

N, LENGTH, WORDS, WIDTH = 8, 10, 12, 8
RNG = np.random.default_rng(0)
LENGTHS = np.array([9, 3, 10, 5, 2, 8, 6, 4])
IDS = np.arange(N, dtype=np.int32)


def drawn(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def words(*shape: int) -> np.ndarray:
    return RNG.integers(1, WORDS, shape).astype(np.int32)


TEXT = {"tokens": words(N, LENGTH) * (np.arange(LENGTH) < LENGTHS[:, None]).astype(np.int32), "id": IDS}
ROWS = {"x": drawn(N, 5), "y": drawn(N), "weight": np.abs(drawn(N)), "id": IDS}
LINE = {"w": drawn(5), "b": np.float32(0.1)}
LAYERS = {"embed": drawn(WORDS, WIDTH), "w": 0.3 * drawn(3, WIDTH, WIDTH), "out": drawn(WIDTH, WORDS)}


class Right(NamedTuple):
    """Arguments of `check_step` with a correct step."""

    make_step: Any
    params: Any
    batch: Any
    options: dict[str, Any]


RIGHT: dict[str, Right] = {}


def right(params: Any, batch: Any, **options: Any) -> Callable[[Any], Any]:
    """Registers a factory of correct steps under the function's name."""

    def add(make_step: Any) -> Any:
        RIGHT[make_step.__name__] = Right(make_step, params, batch, options)
        return make_step

    return add


def counted(name: str, params: Any, batch: Any, loss: Any, **options: Any) -> None:
    RIGHT[name] = Right(by_counts(loss), params, batch, options)


def averaged(name: str, params: Any, batch: Any, loss: Any) -> None:
    RIGHT[name] = Right(averaging(loss), params, batch, {})


# --- language models ---


class Model(nn.Module):
    dtype: Any = jnp.float32
    dropout: float = 0.0

    @nn.compact
    def __call__(self, tokens: Any, train: bool = False) -> Any:
        x = nn.Embed(WORDS, WIDTH, dtype=self.dtype)(tokens)
        x = x + jnp.cumsum(x, 1) / jnp.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        x = nn.gelu(nn.Dense(2 * WIDTH, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(WORDS, dtype=self.dtype)(x).astype(jnp.float32)


def shifted(batch: Any) -> tuple[Any, Any, Any]:
    labels = batch["tokens"][:, 1:]
    return batch["tokens"][:, :-1], labels, (labels > 0).astype(jnp.float32)


def entropy(model: Model, params: Any, batch: Any, **others: Any) -> tuple[Any, Any]:
    """Summed cross entropy over the real tokens, and their number."""
    x, y, mask = shifted(batch)
    each = optax.softmax_cross_entropy_with_integer_labels(model.apply({"params": params}, x, **others), y)
    return (each * mask).sum(), mask.sum()


def dropped(model: Model, params: Any, batch: Any) -> tuple[Any, Any]:
    """`entropy` with a dropout key per sentence."""

    def one(tokens: Any, i: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(3), i)
        return entropy(model, params, {"tokens": tokens[None]}, train=True, rngs={"dropout": key})

    made = jax.vmap(one)(batch["tokens"], batch["id"])
    return made[0].sum(), made[1].sum()


def initialized(module: nn.Module, x: Any) -> Any:
    """Initial variables of the module, under JAX's default rank and dtype promotion."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return jax.tree.map(np.asarray, module.init(jax.random.key(0), x))


P = initialized(Model(), TEXT["tokens"][:, :-1])["params"]
LM = partial(entropy, Model())
counted("float32", P, TEXT, LM)
counted("bfloat16", P, TEXT, partial(entropy, Model(dtype=jnp.bfloat16)))
counted("bfloat16 and dropout by sentence", P, TEXT, partial(dropped, Model(dtype=jnp.bfloat16, dropout=0.3)))


def regularized(p: Any, batch: Any) -> tuple[Any, Any]:
    x, y, mask = shifted(batch)
    logits = Model().apply({"params": p}, x)
    labels = optax.smooth_labels(jax.nn.one_hot(y, WORDS), 0.1)
    each = optax.softmax_cross_entropy(logits, labels) + 1e-4 * jax.nn.logsumexp(logits, -1) ** 2
    return (each * mask).sum(), mask.sum()


def distilled(p: Any, batch: Any) -> tuple[Any, Any]:
    x, _, mask = shifted(batch)
    teacher = jax.lax.stop_gradient(Model().apply({"params": scaled(P, 0.5)}, x) / 2)
    student = jax.nn.log_softmax(Model().apply({"params": p}, x) / 2)
    each = (jax.nn.softmax(teacher) * (jax.nn.log_softmax(teacher) - student)).sum(-1)
    return 4 * (each * mask).sum(), mask.sum()


def adapted(p: Any, batch: Any) -> tuple[Any, Any]:
    dense = P["Dense_0"] | {"kernel": P["Dense_0"]["kernel"] + p["a"] @ p["b"]}
    return LM(P | {"Dense_0": dense}, batch)


counted("label smoothing and z-loss", P, TEXT, regularized)
counted("distillation", P, TEXT, distilled)
counted("low-rank adapters", {"a": drawn(WIDTH, 2), "b": 0.1 * drawn(2, 2 * WIDTH)}, TEXT, adapted)


@right(P, TEXT)
@jitted
def fori_loop_and_dynamic_slices(p: Any, batch: Any, k: int) -> Any:
    size = len(batch["tokens"]) // k

    def body(i: Any, carry: Any) -> Any:
        x = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i * size, size), batch)
        (_, count), grads = jax.value_and_grad(LM, has_aux=True)(p, x)
        return plus(carry, (grads, count))

    grads, count = jax.lax.fori_loop(0, k, body, (jax.tree.map(jnp.zeros_like, p), 0.0))
    return jax.tree.map(lambda x: x / count, grads)


@right(P, TEXT)
def loss_scale_in_float16(k: int) -> Any:
    def loss(p: Any, batch: Any) -> Any:
        total, count = entropy(Model(dtype=jnp.float16), p, batch)
        return total * 128, count

    return jax.jit(lambda p, batch: scaled(in_a_scan(loss, k, p, batch), 1 / 128))


@right(P, TEXT)
@jitted
def words_counted_first(p: Any, batch: Any, k: int) -> Any:
    count = shifted(batch)[2].sum()
    return plus(*(jax.grad(lambda p, x: LM(p, x)[0] / count)(p, x) for x in parts(batch, k)))


def padded(batch: Any, n: int) -> Any:
    return jax.tree.map(lambda x: np.concatenate([x, np.zeros((n, *x.shape[1:]), x.dtype)]), batch)


UNEVEN = {"microbatches": (3, 8), "pad": padded}
RIGHT["uneven, an example each, and padded"] = RIGHT["words_counted_first"]._replace(options=UNEVEN)


@right(P, TEXT)
def means_weighted_by_words(k: int) -> Any:
    def mean(p: Any, batch: Any) -> Any:
        total, count = LM(p, batch)
        return total / count, count

    @jax.jit
    def step(p: Any, batch: Any) -> Any:
        total, seen = jax.tree.map(jnp.zeros_like, p), 0.0
        for text in parts(batch, k):
            (_, count), grads = jax.value_and_grad(mean, has_aux=True)(p, text)
            seen = seen + count
            total = jax.tree.map(lambda t, x, c=count, s=seen: t + (x - t) * (c / s), total, grads)
        return total

    return step


@right(P, TEXT)
def penalty_added_once(k: int) -> Any:
    return jax.jit(lambda p, batch: plus(in_a_scan(LM, k, p, batch), scaled(p, 1e-2)))


@right(jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), P), TEXT)
def bfloat16_parameters_and_float32_accumulator(k: int) -> Any:
    grad = jax.value_and_grad(partial(entropy, Model(dtype=jnp.bfloat16)), has_aux=True)

    @jax.jit
    def step(p: Any, batch: Any) -> Any:
        total, count = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), p), 0.0
        for text in parts(batch, k):
            (_, c), grads = grad(p, text)
            total, count = plus(total, jax.tree.map(lambda x: x.astype(jnp.float32), grads)), count + c
        return jax.tree.map(lambda x: (x / count).astype(jnp.bfloat16), total)

    return step


# --- optimizers ---


def updated(tx: Any, after: Callable[[Any, Any], Any] = lambda new, old: new, loss: Any = LM, params: Any = P) -> Right:
    @jitted
    def make_step(p: Any, batch: Any, k: int) -> Any:
        updates, _ = tx.update(in_a_scan(loss, k, p, batch), tx.init(p), p)
        return after(optax.apply_updates(p, updates), p)

    return Right(make_step, params, TEXT, {"returns": "params"})


FROZEN = {"t": optax.adam(1e-2), "f": optax.set_to_zero()}
SCHEDULE = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 3, 100)
RIGHT |= {
    "adamw, clipped, with a schedule": updated(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE, weight_decay=0.1))
    ),
    "sgd with momentum": updated(optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "lion": updated(optax.lion(1e-3)),
    "adafactor": updated(optax.adafactor(1e-2)),
    "muon": updated(optax.contrib.muon(1e-2)),
    "lamb": updated(optax.lamb(1e-2)),
    "clipped by value": updated(optax.chain(optax.clip(0.05), optax.rmsprop(1e-2))),
    "noise once": updated(optax.chain(optax.add_noise(0.05, 0.0, 0), optax.sgd(0.1))),
    "second moments of the mean": updated(optax.chain(optax.scale_by_rss(), optax.scale(-0.1))),
    "average of parameters": updated(optax.adam(1e-2), lambda new, old: plus(scaled(old, 0.9), scaled(new, 0.1))),
    "frozen embeddings": updated(
        optax.multi_transform(
            FROZEN, jax.tree_util.tree_map_with_path(lambda path, _: "f" if "Embed" in str(path) else "t", P)
        )
    ),
}

# --- rows, pictures, statistics ---


def residual(p: Any, batch: Any) -> Any:
    return batch["x"] @ p["w"] + p["b"] - batch["y"]


def quantile(p: Any, batch: Any) -> Any:
    e = -residual(p, batch)
    return jnp.maximum(0.9 * e, -0.1 * e).mean()


counted(
    "weighted rows",
    LINE,
    ROWS,
    lambda p, batch: ((batch["weight"] * residual(p, batch) ** 2).sum(), batch["weight"].sum()),
)
averaged("quantile", LINE, ROWS, quantile)


@right(LINE, ROWS)
def private_by_example(k: int) -> Any:
    """DP-SGD: clips the gradient of each example and adds noise once."""

    def one(p: Any, x: Any, y: Any) -> Any:
        return optax.huber_loss(x @ p["w"] + p["b"], y)

    @jax.jit
    def step(p: Any, batch: Any) -> Any:
        total = jax.tree.map(jnp.zeros_like, p)
        for x in parts(batch, k):
            grads = jax.vmap(jax.grad(one), (None, 0, 0))(p, x["x"], x["y"])
            norms = jnp.sqrt(sum((g.reshape(len(g), -1) ** 2).sum(1) for g in jax.tree.leaves(grads)))
            factors = jnp.minimum(1, 0.5 / norms)
            total = plus(total, jax.tree.map(lambda g, f=factors: jnp.tensordot(f, g, 1), grads))
        keys = dict(zip(total, jax.random.split(jax.random.key(0), len(total)), strict=True))
        return {n: (x + 0.1 * jax.random.normal(keys[n], x.shape)) / N for n, x in total.items()}

    return step


class Picture(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.relu(nn.GroupNorm(2)(nn.Conv(6, (3, 3))(x)))
        return nn.Dense(4)(nn.avg_pool(x, (2, 2), (2, 2)).reshape(len(x), -1))


IMAGES = {"image": drawn(N, 6, 6, 3), "label": RNG.integers(0, 4, N).astype(np.int32), "id": IDS}
PICTURE = initialized(Picture(), IMAGES["image"])["params"]


def labelled(p: Any, batch: Any) -> Any:
    logits = Picture().apply({"params": p}, batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def augmented(p: Any, batch: Any) -> Any:
    def one(image: Any, i: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(1), i)
        return jnp.where(jax.random.bernoulli(key), image[:, ::-1], image) + 0.1 * jax.random.normal(key, image.shape)

    return labelled(p, batch | {"image": jax.vmap(one)(batch["image"], batch["id"])})


averaged("pictures", PICTURE, IMAGES, labelled)
averaged("pictures augmented by a key per example", PICTURE, IMAGES, augmented)


class Normalized(nn.Module):
    axis: str | None = None

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.BatchNorm(use_running_average=False, axis_name=self.axis)(nn.Dense(6)(x))
        return nn.Dense(1)(nn.relu(x))[..., 0]


NORMALIZED = initialized(Normalized(), ROWS["x"])


def normalized(p: Any, x: Any, axis: str | None = None) -> Any:
    variables = {"params": p, "batch_stats": NORMALIZED["batch_stats"]}
    return Normalized(axis).apply(variables, x, mutable=["batch_stats"])[0]


@right(NORMALIZED["params"], ROWS)
def statistics_over_microbatches(k: int) -> Any:
    def loss(p: Any, batch: Any) -> Any:
        parts = stacked(batch, k)
        made = jax.vmap(partial(normalized, p, axis="k"), axis_name="k")(parts["x"])
        return ((made - parts["y"]) ** 2).mean()

    return jax.jit(jax.grad(loss))


def on_mesh(devices: int) -> Any:
    return jax.make_mesh((devices,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def on_each(local: Any, devices: int) -> Any:
    spec = jax.sharding.PartitionSpec
    shard = jax.shard_map(local, mesh=on_mesh(devices), in_specs=(spec(), spec("d")), out_specs=spec())
    return jax.jit(shard)


@right(NORMALIZED["params"], ROWS, microbatches=(1,), devices=(2, 4))
def statistics_over_devices(k: int, devices: int = 1) -> Any:
    del k

    def loss(p: Any, batch: Any) -> Any:
        return jax.lax.pmean(((normalized(p, batch["x"], "d") - batch["y"]) ** 2).mean(), "d")

    return on_each(jax.grad(loss), devices)


# --- mixtures of experts, packed rows, attention ---

EXPERTS = {"router": drawn(WIDTH, 3), "experts": 0.3 * drawn(3, WIDTH, WIDTH), **LAYERS}


def routed(p: Any, batch: Any) -> tuple[Any, Any, Any, Any]:
    """Summed cross entropy, number of tokens, and per sentence the counts and summed probabilities of the experts."""
    x, y, mask = shifted(batch)
    h = p["embed"][x]
    probable = jax.nn.softmax(h @ p["router"])
    first = jax.nn.one_hot(probable.argmax(-1), 3, dtype=probable.dtype)
    made = jnp.tanh(jnp.einsum("nld,edf->nlef", h, p["experts"]))
    h = h + jnp.einsum("nle,nlef->nlf", first * probable, made)
    each = optax.softmax_cross_entropy_with_integer_labels(h @ p["out"], y)
    return (each * mask).sum(), mask.sum(), (first * mask[..., None]).sum(1), (probable * mask[..., None]).sum(1)


@right(EXPERTS, TEXT)
def balance_of_sentences(k: int) -> Any:
    def loss(p: Any, batch: Any) -> Any:
        total = count = balance = 0.0
        for x in parts(batch, k):
            a, c, first, probable = routed(p, x)
            sizes = shifted(x)[2].sum(1)
            total, count = total + a, count + c
            balance = balance + (3 * (first * probable).sum(-1) / sizes**2).sum()
        return total / count + 0.5 * balance / N

    return jax.jit(jax.grad(loss))


@right(EXPERTS, TEXT)
@jitted
def balance_of_the_batch(p: Any, batch: Any, k: int) -> Any:
    """Counts the use of the experts over the full batch in a first pass."""
    count = shifted(batch)[2].sum()
    used = sum(routed(p, x)[2].sum(0) for x in parts(batch, k)) / count

    def loss(p: Any, x: Any) -> Any:
        total, _, _, probable = routed(p, x)
        return (total + 1.5 * (jax.lax.stop_gradient(used) * probable.sum(0)).sum()) / count

    return plus(*(jax.grad(loss)(p, x) for x in parts(batch, k)))


SEGMENTS = np.array(
    [
        [1, 1, 1, 1, 2, 2, 2, 2, 2, 0],
        [1] * 10,
        [1, 1, 1, 2, 2, 2, 3, 3, 3, 3],
        [1] * 7 + [0] * 3,
        [1, 1] + [2] * 8,
        [1] * 5 + [2] * 4 + [0],
        [1] * 6 + [0] * 4,
        [1] * 9 + [0],
    ],
    np.int32,
)
PACKED = {"tokens": words(N, LENGTH), "segments": SEGMENTS}


def in_segments(batch: Any) -> Any:
    s = batch["segments"]
    return ((s[:, 1:] == s[:, :-1]) & (s[:, 1:] > 0)).astype(jnp.float32)


def packed(p: Any, batch: Any) -> tuple[Any, Any]:
    x, y, s, mask = batch["tokens"][:, :-1], batch["tokens"][:, 1:], batch["segments"], in_segments(batch)
    h = p["embed"][x]
    same = (s[:, :-1, None] == s[:, None, :-1]) & jnp.tri(LENGTH - 1, dtype=bool)
    scores = jnp.where(same, jnp.einsum("nld,nmd->nlm", h @ p["w"][0], h), -1e9)
    h = h + jax.nn.softmax(scores) @ h
    return (optax.softmax_cross_entropy_with_integer_labels(h @ p["out"], y) * mask).sum(), mask.sum()


def of_documents(p: Any, batch: Any) -> tuple[Any, Any]:
    """Sum over documents of the mean loss of their tokens, and the number of documents."""
    mask, total = in_segments(batch), jax.vmap(partial(jax.ops.segment_sum, num_segments=4))
    each = -log_probabilities(p, batch["tokens"]) * mask
    sums, counts = (total(x, batch["segments"][:, 1:])[:, 1:] for x in (each, mask))
    means = jnp.where(counts > 0, sums / jnp.maximum(counts, 1), 0)
    return means.sum(), (counts > 0).sum().astype(jnp.float32)


def log_probabilities(p: Any, tokens: Any) -> Any:
    logits = jnp.tanh(jnp.asarray(p["embed"])[tokens[:, :-1]] @ p["w"][0]) @ p["out"]
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)[..., 0]


def layered(p: Any, batch: Any) -> tuple[Any, Any]:
    """Layers in a scan, rematerialized in the backward pass."""
    x, y, mask = shifted(batch)
    h, _ = jax.lax.scan(jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w), None)), p["embed"][x], p["w"])
    return (optax.softmax_cross_entropy_with_integer_labels(h @ p["out"], y) * mask).sum(), mask.sum()


FUSED = {"embed": drawn(WORDS, WIDTH), "qkv": drawn(WIDTH, 3 * WIDTH), "bias": drawn(3 * WIDTH)}
FUSED |= {"out": drawn(WIDTH, WORDS)}
APART = {name: FUSED[name] for name in ("embed", "out")}
APART |= {name: FUSED["qkv"][:, i * WIDTH : (i + 1) * WIDTH] for i, name in enumerate("qkv")}
APART |= {f"{name}_bias": FUSED["bias"][i * WIDTH : (i + 1) * WIDTH] for i, name in enumerate("qkv")}


def attended(p: Any, batch: Any) -> tuple[Any, Any]:
    """Attention with a bias of the keys, which has no effect: its gradient is 0 up to rounding."""
    x, y, mask = shifted(batch)
    h = p["embed"][x]
    if "qkv" in p:
        q, k, v = jnp.split(h @ p["qkv"] + p["bias"], 3, -1)
    else:
        q, k, v = (h @ p[name] + p[f"{name}_bias"] for name in "qkv")
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), q @ k.swapaxes(1, 2) / np.sqrt(WIDTH), -1e9)
    made = optax.softmax_cross_entropy_with_integer_labels((h + jax.nn.softmax(scores) @ v) @ p["out"], y)
    return (made * mask).sum(), mask.sum()


RIGHT |= {
    f"attention with biases {where}, {name}": updated(tx, loss=attended, params=params)
    for where, params in (("apart", APART), ("fused", FUSED))
    for name, tx in (
        ("adamw", optax.adamw(1e-2)),
        ("adamw of large decay", optax.adamw(1e-3, weight_decay=0.1)),
        ("lion", optax.lion(1e-3)),
        ("sgd", optax.sgd(0.1)),
    )
}
counted("packed rows", LAYERS, PACKED, packed)
counted("packed rows, a mean of documents", LAYERS, PACKED, of_documents)
counted("layers in a scan", LAYERS, TEXT, layered)

# --- after training ---

REWARDED = {
    "tokens": words(N, LENGTH),
    "mask": (np.arange(LENGTH) < LENGTHS[:, None]).astype(np.float32),
    "reward": drawn(N),
    "group": np.repeat(np.arange(4), 2).astype(np.int32),
    "old": -np.abs(drawn(N, LENGTH - 1)),
}


def advantages(reward: Any, group: Any, groups: int) -> Any:
    count = jnp.maximum(jax.ops.segment_sum(jnp.ones_like(reward), group, groups), 1)
    mean = jax.ops.segment_sum(reward, group, groups) / count
    spread = jax.ops.segment_sum((reward - mean[group]) ** 2, group, groups) / count
    return (reward - mean[group]) / (jnp.sqrt(spread[group]) + 1e-4)


def policy(p: Any, batch: Any, advantage: Any) -> tuple[Any, Any]:
    ratio = jnp.exp(log_probabilities(p, batch["tokens"]) - batch["old"])
    better = jnp.minimum(ratio * advantage[:, None], jnp.clip(ratio, 0.8, 1.2) * advantage[:, None])
    mask = batch["mask"][:, 1:]
    return -(better * mask).sum(), mask.sum()


@right(LAYERS, REWARDED)
@jitted
def advantages_before_the_division(p: Any, batch: Any, k: int) -> Any:
    batch = batch | {"advantage": advantages(batch["reward"], batch["group"], 4)}
    return in_a_scan(lambda p, x: policy(p, x, x["advantage"]), k, p, batch)


def of_sequences(p: Any, batch: Any) -> tuple[Any, Any]:
    mask = batch["mask"][:, 1:]
    means = (log_probabilities(p, batch["tokens"]) * mask).sum(1) / mask.sum(1)
    return -means.sum(), jnp.float32(len(means))


def preferred(p: Any, batch: Any) -> Any:
    old = jax.tree.map(lambda x: x + 0.1, LAYERS)
    ahead = [
        log_probabilities(q, batch["chosen"]).sum(1) - log_probabilities(q, batch["rejected"]).sum(1) for q in (p, old)
    ]
    return -jax.nn.log_sigmoid(0.1 * (ahead[0] - ahead[1])).mean()


counted(
    "groups not split by microbatches",
    LAYERS,
    REWARDED,
    lambda p, x: policy(p, x, advantages(x["reward"], x["group"], 4)),
)
counted("a mean of sequences' means", LAYERS, REWARDED, of_sequences)
averaged("preferences", LAYERS, {"chosen": words(N, LENGTH), "rejected": words(N, LENGTH)}, preferred)


@right(LAYERS, REWARDED)
def two_denominators(k: int) -> Any:
    def loss(p: Any, batch: Any) -> Any:
        total = count = apart = 0.0
        for x in parts(batch, k):
            mask, log_probs = x["mask"][:, 1:], log_probabilities(p, x["tokens"])
            total, count = total - (log_probs * mask).sum(), count + mask.sum()
            apart = apart + ((log_probs - x["old"]) ** 2).mean(1).sum()
        return total / count + 0.1 * apart / N

    return jax.jit(jax.grad(loss))


# --- generative, contrastive, molecules ---

CODES = {"enc": drawn(5, 4), "dec": drawn(2, 5)}


def variational(p: Any, batch: Any) -> Any:
    mean, spread = jnp.split(batch["x"] @ p["enc"], 2, -1)
    noise = jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(jax.random.key(0), i), (2,)))(batch["id"])
    made = (mean + jnp.exp(spread / 2) * noise) @ p["dec"]
    apart = 0.5 * (jnp.exp(spread) + mean**2 - 1 - spread).sum(-1)
    return (((made - batch["x"]) ** 2).sum(-1) + apart).mean()


def diffused(p: Any, batch: Any) -> Any:
    a = jnp.cos(batch["t"])[:, None]
    made = jnp.tanh((a * batch["x"] + jnp.sqrt(1 - a**2) * batch["noise"]) @ p["enc"])[:, :2] @ p["dec"]
    return ((made - batch["noise"]) ** 2 * (1 + batch["t"])[:, None]).mean()


averaged("a variational code", CODES, ROWS, variational)
averaged("diffusion", CODES, ROWS | {"t": np.linspace(0, 1, N, dtype=np.float32), "noise": drawn(N, 5)}, diffused)

PAIRS = {"x": drawn(N, 5), "y": drawn(N, 5)}
TOWERS = {"x": drawn(5, 3), "y": drawn(5, 3)}


def contrasted(x: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(x @ y.T, jnp.arange(len(x))).mean()


@right(TOWERS, PAIRS)
def embeddings_first(k: int) -> Any:
    """Embeds all microbatches, differentiates the loss in the embeddings, then backpropagates by microbatch."""

    def encode(p: Any, batch: Any) -> Any:
        return batch["x"] @ p["x"], batch["y"] @ p["y"]

    @jax.jit
    def step(p: Any, batch: Any) -> Any:
        made = [encode(p, x) for x in parts(batch, k)]
        by = jax.grad(contrasted, (0, 1))(*(jnp.concatenate(x) for x in zip(*made, strict=True)))
        total = jax.tree.map(jnp.zeros_like, p)
        for i in range(k):
            _, back = jax.vjp(lambda p, i=i: encode(p, part(batch, k, i)), p)
            total = plus(total, back(part(by, k, i))[0])
        return total

    return step


GRAPHS = {"nodes": drawn(N, 4, 5), "n": np.array([4, 2, 3, 1, 4, 3, 2, 4], np.int32), "y": drawn(N)}


def real_nodes(batch: Any) -> Any:
    return (jnp.arange(4) < batch["n"][:, None]).astype(jnp.float32)


def energies(p: Any, batch: Any) -> tuple[Any, Any]:
    made = (jnp.tanh(batch["nodes"] @ p["w"]) * real_nodes(batch)).sum(1) / batch["n"] + p["b"]
    return ((made - batch["y"]) ** 2).sum(), jnp.float32(len(batch["n"]))


def forces(p: Any, batch: Any) -> tuple[Any, Any]:
    made = jax.vmap(jax.grad(lambda x: (jnp.sin(x @ p["w"]) * p["b"]).sum()))(batch["nodes"])
    mask = real_nodes(batch)[..., None]
    return ((made - 0.1) ** 2 * mask).sum(), mask.sum() * 5


counted("padded graphs", LINE, GRAPHS, energies)
counted("forces", LINE, GRAPHS, forces)
