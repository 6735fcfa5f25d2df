"""Measures the attention ops on the CPU against forms without packing and without pages.

    MALLOC_MMAP_THRESHOLD_=4000000000 MALLOC_TRIM_THRESHOLD_=8000000000 MALLOC_TOP_PAD_=268435456 \
        python -m benchmarks.attention_ops --rounds=15

Prefill: the attention of one layer over a chunk (12 query heads, 4 KV heads, head size 64), against
causal attention in query blocks of 256 rows over the same prefix. Decode: a whole step of a 124.7M
Llama (hidden size 768, 12 layers, FFN 2048, vocabulary 32000) whose KV is in pages, against the
same step with a contiguous cache of exactly the batch and context. In each round all forms are
timed one after the other, best of 3. Printed are medians over rounds: the baseline's time and the
ratios."""

import argparse
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.ops.kv_pages import decode_coordinates, write_tokens
from jdisagg.ops.paged_attention import paged_attention
from jdisagg.ops.prefill_attention import prefill_attention

N, K, H, D, F, V, LAYERS, CONTEXT = 12, 4, 64, 768, 2048, 32000, 12, 512
SCALE = H**-0.5
Step = Callable[[], object]


def compare(title: str, contenders: dict[str, Step], rounds: int) -> None:
    """Prints the ratios of all contenders to the first one, the baseline."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for step in contenders.values():
        jax.block_until_ready(step())
    for _ in range(rounds):
        for name, step in contenders.items():
            best = float("inf")
            for _ in range(3):
                start = time.perf_counter()
                jax.block_until_ready(step())
                best = min(best, time.perf_counter() - start)
            times[name].append(best)
    base, *others = contenders
    ratios = (
        f"{name} {np.median(np.array(times[name]) / np.array(times[base])):.2f}" for name in others
    )
    print(
        f"{title:<24} {base} {np.median(times[base]) * 1e3:7.2f} ms; ratios: {', '.join(ratios)}",
        flush=True,
    )


def plain_causal(q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array) -> jax.Array:
    tokens, dtype = q_TNH.shape[0], q_TNH.dtype
    q_KGTH = q_TNH.reshape(tokens, K, N // K, H).transpose(1, 2, 0, 3)
    k_KTH, v_KTH, outputs = k_TKH.swapaxes(0, 1), v_TKH.swapaxes(0, 1), []
    for low in range(0, tokens, 256):
        high = min(low + 256, tokens)
        s = (
            jnp.einsum(
                "kgth,ksh->kgts",
                q_KGTH[:, :, low:high],
                k_KTH[:, :high],
                preferred_element_type=jnp.float32,
            )
            * SCALE
        )
        seen = jnp.arange(low, high)[:, None] >= jnp.arange(high)[None, :]
        p = jax.nn.softmax(jnp.where(seen[None, None], s, -1e30), axis=-1).astype(dtype)
        outputs.append(
            jnp.einsum(
                "kgts,ksh->kgth", p, v_KTH[:, :high], preferred_element_type=jnp.float32
            ).astype(dtype)
        )
    return jnp.concatenate(outputs, axis=2).transpose(2, 0, 1, 3).reshape(q_TNH.shape)


def prefill(tokens: int, dtype: jnp.dtype, rounds: int) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (tokens, heads, H)).astype(dtype)
        for key, heads in zip(keys, (N, K, K), strict=True)
    )
    positions = jnp.arange(tokens, dtype=jnp.int32)
    one, many = jnp.zeros(tokens, jnp.int32), positions // 64

    def ours(segment: jax.Array, packed: bool) -> Step:
        attend = jax.jit(functools.partial(prefill_attention, scale=SCALE, packed=packed))
        return lambda: attend(q, k, v, segment, positions)

    plain = jax.jit(plain_causal)
    contenders: dict[str, Step] = {
        "plain": lambda: plain(q, k, v),
        "one sequence": ours(one, False),
        "packed, one sequence": ours(one, True),
        "packed, sequences of 64": ours(many, True),
    }
    compare(f"prefill {tokens} {dtype.name}", contenders, rounds)


def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiplies x with a weight. On CPU a single bfloat16 row is slow, so it is computed twice."""
    if x.dtype == jnp.bfloat16 and x.shape[0] == 1:
        return (jax.lax.optimization_barrier(jnp.concatenate([x, x])) @ weight)[:1]
    return x @ weight


def make_weights(dtype: jnp.dtype) -> dict[str, list[jax.Array]]:
    shapes = {"qkv": (D, (N + 2 * K) * H), "out": (N * H, D), "up": (D, 2 * F), "down": (F, D)}
    rng = np.random.default_rng(0)

    def draw(shape: tuple[int, int]) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * shape[0] ** -0.5, dtype)

    weights = {name: [draw(shape) for _ in range(LAYERS)] for name, shape in shapes.items()}
    return weights | {
        "head": [draw((D, V))],
        "embedding": [jnp.asarray(rng.standard_normal((V, D), np.float32), dtype)],
    }


def norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)


def model_step(
    attend: Callable[..., tuple[jax.Array, tuple[jax.Array, jax.Array]]],
) -> Callable[..., object]:
    def step(
        caches: list, weights: dict, tokens_B: jax.Array, positions_B: jax.Array, *table: jax.Array
    ) -> object:
        x, new = weights["embedding"][0][tokens_B], []
        for layer, cache in enumerate(caches):
            heads = linear(norm(x), weights["qkv"][layer]).reshape(-1, N + 2 * K, H)
            q, k, v = jnp.split(heads, [N, N + K], axis=1)
            o, cache = attend(q, k, v, cache, positions_B, *table)
            new.append(cache)
            x = x + linear(o.reshape(-1, N * H), weights["out"][layer])
            gate, up = jnp.split(linear(norm(x), weights["up"][layer]), 2, axis=1)
            x = x + linear(jax.nn.silu(gate) * up, weights["down"][layer])
        return new, jnp.argmax(linear(norm(x), weights["head"][0]).astype(jnp.float32), -1).astype(
            jnp.int32
        )

    return jax.jit(step, donate_argnums=0)


def slot_attend(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: tuple, positions_B: jax.Array
) -> tuple:
    row = jnp.arange(q.shape[0])
    k_BKSH, v_BKSH = (
        slots.at[row, :, positions_B].set(new, mode="promise_in_bounds", unique_indices=True)
        for slots, new in zip(cache, (k, v), strict=True)
    )
    q_BKGH = q.reshape(-1, K, N // K, H)
    s = jnp.einsum("bkgh,bksh->bkgs", q_BKGH, k_BKSH, preferred_element_type=jnp.float32) * SCALE
    seen = jnp.arange(CONTEXT)[None] <= positions_B[:, None]
    p = jax.nn.softmax(jnp.where(seen[:, None, None], s, -1e30), axis=-1).astype(q.dtype)
    o = jnp.einsum("bkgs,bksh->bkgh", p, v_BKSH, preferred_element_type=jnp.float32).astype(q.dtype)
    return o.reshape(q.shape), (k_BKSH, v_BKSH)


def page_attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: tuple,
    positions_B: jax.Array,
    table_BN: jax.Array,
) -> tuple:
    at = decode_coordinates(table_BN, positions_B, slots=cache[0].shape[2])
    k_pages, v_pages = (
        write_tokens(pages, new, *at, unique=True) for pages, new in zip(cache, (k, v), strict=True)
    )
    return paged_attention(q, k_pages, v_pages, table_BN, positions_B, scale=SCALE), (
        k_pages,
        v_pages,
    )


def decode(batch: int, dtype: jnp.dtype, rounds: int, weights: dict[str, list[jax.Array]]) -> None:
    rng = np.random.default_rng(batch)
    tokens = jnp.asarray(rng.integers(0, V, batch), jnp.int32)
    positions = jnp.asarray(rng.integers(420, 480, batch), jnp.int32)

    def contender(step: Callable[..., object], shape: tuple[int, ...], *table: jax.Array) -> Step:
        draw = jax.jit(lambda key: jax.random.normal(key, shape, dtype), donate_argnums=())
        caches = [
            tuple(draw(key) for key in jax.random.split(jax.random.key(layer)))
            for layer in range(LAYERS)
        ]

        def run() -> object:
            nonlocal caches
            caches, chosen = step(caches, weights, tokens, positions, *table)  # type: ignore[misc]
            return np.asarray(chosen)

        return run

    contenders: dict[str, Step] = {
        "slots": contender(model_step(slot_attend), (batch, K, CONTEXT, H))
    }
    for slots in (128, 16):
        pages = batch * CONTEXT // slots + 1
        table = rng.permutation(pages)[: pages - 1].reshape(batch, -1)
        contenders[f"pages of {slots}"] = contender(
            model_step(page_attend), (pages, K, slots, H), jnp.asarray(table, jnp.int32)
        )
    compare(f"decode B{batch} {dtype.name}", contenders, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--part", choices=("prefill", "decode", "both"), default="both")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "both"), default="both")
    options = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {len(jax.devices())} device(s)")
    names = ("float32", "bfloat16") if options.dtype == "both" else (options.dtype,)
    for dtype in map(jnp.dtype, names):
        if options.part != "decode":
            for tokens in (128, 512, 2048):
                prefill(tokens, dtype, options.rounds)
        if options.part != "prefill":
            weights = make_weights(dtype)
            for batch in (1, 8, 32):
                decode(batch, dtype, options.rounds, weights)


if __name__ == "__main__":
    main()
