"""Compares each op, compiled for the platform, with the same op in float32 (matrix products
"highest"), and reports bytes read or operations per second.

`worst`: largest difference, divided by the largest magnitude of the right result. A row fails if
this exceeds the data type's bound, or if integers differ."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device_day.day import Day, Figures
from benchmarks.device_day.timing import seconds_of
from jdisagg.model_api import Shards
from jdisagg.ops import paged_attention_pallas
from jdisagg.ops.moe import ExpertWeights, route, routed_experts
from jdisagg.ops.paged_attention import paged_attention
from jdisagg.ops.prefill_attention import PastPages, prefill_attention
from jdisagg.ops.sampling import SamplingRows, greedy, sample
from jdisagg.transfer.channel import BlockStamp
from jdisagg.transfer.codec import CODECS, codec, stamp_array

TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}
FULL, STAGES = "even", (3, 4, 5)


class WrongAnswer(AssertionError):
    """Raised if the results of an op are wrong."""


def run(day: Day) -> None:
    platform = jax.default_backend()
    for dtype in ("bfloat16", "float32"):
        for groups in (1, 4) if day.small else (1, 4, 8, 16):
            for page in (16,) if day.small else (16, 64, 128):
                name = f"decode attention, {dtype}, {groups} heads a kv head, pages of {page}"
                day.row(name, partial(decode_attention, day, platform, dtype, groups, page))
    for lengths in ("ragged", "one long"):
        for window in (None, 100 if day.small else 1000):
            name = f"decode attention, lengths {lengths}, window {window}"
            measure = partial(
                decode_attention, day, platform, "bfloat16", 4, 64, lengths=lengths, window=window
            )
            day.row(name, measure)
    for width in (256, 512):
        measure = partial(decode_attention, day, platform, "bfloat16", 4, 64, width=width)
        day.row(f"decode attention, heads of {width}", measure)
    for stages in STAGES:
        measure = partial(with_stages, day, stages)
        day.row(f"decode attention, {stages} stages", measure, gpu=True)
    for form in ("one", "past", "packed", "packed past"):
        for window in (None, 64):
            for sinks in (False, True):
                name = f"prefill attention, {form}, window {window}" + ", sinks" * sinks
                day.row(name, partial(chunk_attention, day, platform, form, window, sinks=sinks))
        measure = partial(chunk_attention, day, platform, form, 64, width=256)
        day.row(f"prefill attention, {form}, window 64, heads of 256", measure)
    for tokens in (8, 64) if day.small else (8, 32, 128, 2048):
        day.row(f"experts, {tokens} tokens", partial(experts, day, platform, tokens))
    day.row("sampling, as the CPU chooses", partial(sampling, day, platform))
    for name in CODECS:
        day.row(f"codec {name}", partial(packed, day, name))


def difference(got: jax.Array, right: jax.Array, dtype: str) -> float:
    """Returns the largest difference, divided by the largest magnitude of `right`. Raises
    WrongAnswer if it exceeds the bound of the data type."""
    ours, theirs = (np.asarray(array, np.float64) for array in (got, right))
    worst = float(np.max(np.abs(ours - theirs)) / np.max(np.abs(theirs)))
    if not worst <= TOLERANCE[dtype]:
        raise WrongAnswer(f"{worst:.3g} from the same in float32, beyond {TOLERANCE[dtype]}")
    return worst


def precisely(call: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    with jax.default_matmul_precision("highest"):
        wide = (
            a.astype(jnp.float32) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in arrays
        )
        return jax.jit(call)(*wide)


def normal(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def decode_attention(
    day: Day,
    platform: str,
    dtype: str,
    groups: int,
    page: int,
    *,
    lengths: str = FULL,
    window: int | None = None,
    width: int | None = None,
) -> Figures:
    """Compares attention of one token of each of 32 sequences of 2,048 positions with another
    implementation. With lengths "one long", 31 sequences have 128 positions and one has 32,768."""
    batch, context, heads, usual = (4, 256, 2, 64) if day.small else (32, 2048, 8, 128)
    width = width or usual
    longest = context
    if lengths == "one long":
        batch, longest = (4, 2 * context) if day.small else (128, 16 * context)
    rng = np.random.default_rng(0)
    position_B = np.full(batch, context - 1, np.int32)
    if lengths != FULL:
        position_B = rng.integers(0, context, batch).astype(np.int32)
        position_B[-1] = longest - 1
    held = -(-(position_B + 1) // page)
    table = np.zeros((batch, -(-longest // page)), np.int32)
    pages = rng.permutation(int(held.sum())).astype(np.int32)
    for row, (first, count) in enumerate(zip(np.cumsum(held) - held, held, strict=True)):
        table[row, :count] = pages[first : first + count]
    q = normal(0, (batch, groups * heads, width), dtype)
    k, v = (normal(seed, (len(pages), heads, page, width), dtype) for seed in (1, 2))
    attend = partial(paged_attention, scale=width**-0.5, window=window)
    fast = jax.jit(partial(attend, platform=platform))
    rest = jnp.asarray(table), jnp.asarray(position_B)
    # not what is tried: a CPU takes the loop, and a GPU has no room for the whole of a wide table
    other = "gather" if day.small else "loop"
    right = precisely(partial(attend, implementation=other), q, k, v, *rest)
    seconds = seconds_of(lambda: fast(q, k, v, *rest))
    seen = np.minimum(position_B + 1, window or longest).sum()
    read = int(seen) * 2 * heads * width * k.dtype.itemsize
    worst = difference(fast(q, k, v, *rest), right, dtype)
    return {"worst": worst, "us": 1e6 * seconds, "GB/s": read / seconds / 1e9}


def with_stages(day: Day, stages: int) -> Figures:
    usual, paged_attention_pallas.STAGES = paged_attention_pallas.STAGES, stages
    try:
        return decode_attention(day, "gpu", "bfloat16", 4, 64)
    finally:
        paged_attention_pallas.STAGES = usual


def chunk_attention(
    day: Day,
    platform: str,
    form: str,
    window: int | None,
    *,
    sinks: bool = False,
    width: int | None = None,
) -> Figures:
    """Compares attention of a chunk: one prompt, or eight packed prompts of which the first
    continues cached tokens."""
    tokens, heads, groups = (128, 2, 2) if day.small else (4096, 8, 4)
    width = width or (32 if day.small else 128)
    page, packed, behind = 16, "packed" in form, tokens if "past" in form else 0
    rows = 8 if packed else 1
    segment_T = jnp.repeat(jnp.arange(rows, dtype=jnp.int32), tokens // rows)
    position_T = jnp.arange(tokens, dtype=jnp.int32) % (tokens // rows)
    position_T = position_T + jnp.where(segment_T == 0, jnp.int32(behind), 0)
    q = normal(0, (tokens, heads * groups, width), "bfloat16")
    k, v = (normal(seed, (tokens, heads, width), "bfloat16") for seed in (1, 2))
    k_pages, v_pages = (normal(s, (tokens // page, heads, page, width), "bfloat16") for s in (3, 4))
    table = np.zeros((rows, tokens // page), np.int32)
    table[0] = np.random.default_rng(0).permutation(tokens // page)
    length = jnp.asarray([behind] + [0] * (rows - 1), jnp.int32)
    sinks_N = normal(5, (heads * groups,), "float32") if sinks else None
    device_kind = jax.devices()[0].device_kind

    def attend(platform: str, *arrays: jax.Array) -> jax.Array:
        q, k, v, k_pages, v_pages = arrays
        count = jnp.int32(1)
        past = PastPages(k_pages, v_pages, jnp.asarray(table), length, count) if behind else None
        return prefill_attention(
            q, k, v, segment_T, position_T, past, scale=width**-0.5, window=window,
            platform=platform, device_kind=device_kind, packed=packed, sinks_N=sinks_N,
        )  # fmt: skip

    arrays = (q, k, v, k_pages, v_pages)
    fast = jax.jit(partial(attend, platform))
    right = precisely(partial(attend, "cpu"), *arrays)  # that form is right everywhere
    seconds = seconds_of(lambda: fast(*arrays))
    worst = difference(fast(*arrays), right, "bfloat16")
    return {"worst": worst, "us": 1e6 * seconds}


def experts(day: Day, platform: str, tokens: int) -> Figures:
    """Compares the expert layer for tokens that each use eight experts (two if small), with the
    sizes of Qwen3-30B-A3B."""
    held, width, ffn, choices = (8, 64, 64, 2) if day.small else (128, 2048, 768, 8)
    x = normal(0, (tokens, width), "bfloat16")
    shapes = (held, width, ffn), (held, width, ffn), (held, ffn, width)
    arrays = [
        (normal(seed, shape, "float32") * shape[1] ** -0.5).astype(jnp.bfloat16)
        for seed, shape in enumerate(shapes)
    ]
    routing = route(normal(9, (tokens, held), "float32"), choices, normalised=True)
    shards = Shards(platform=platform, device_kind=jax.devices()[0].device_kind)
    fast = jax.jit(
        lambda x, *parts: routed_experts(x, routing, ExpertWeights(*parts), shards, experts=held)
    )

    def dense(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        """Computes every expert for every token, one expert at a time."""
        weight_TE = jnp.zeros((tokens, held)).at[
            jnp.arange(tokens)[:, None], routing.experts_TJ
        ].set(routing.weights_TJ)  # fmt: skip

        def one(sum_TD: jax.Array, part: Any) -> tuple[jax.Array, None]:
            gate_DF, up_DF, down_FD, weight_T = part
            y_TD = (jax.nn.silu(x @ gate_DF) * (x @ up_DF)) @ down_FD
            return sum_TD + weight_T[:, None] * y_TD, None

        return jax.lax.scan(one, jnp.zeros_like(x), (gate, up, down, weight_TE.T))[0]

    right = precisely(dense, x, *arrays)
    seconds = seconds_of(lambda: fast(x, *arrays))
    worst = difference(fast(x, *arrays), right, "bfloat16")
    used = len(np.unique(np.asarray(routing.experts_TJ)))
    read = used * 3 * width * ffn * 2
    return {"worst": worst, "us": 1e6 * seconds, "experts used": used, "GB/s": read / seconds / 1e9}


def sampling(day: Day, platform: str) -> Figures:
    """Checks that equal logits and seeds give the same tokens on the device and on the CPU."""
    batch, vocabulary = (8, 1000) if day.small else (64, 128256)
    logits = np.random.default_rng(0).normal(size=(batch, vocabulary)).astype(np.float32)
    forms = {"greedy": None, "top_p": {"top_p": 0.9}, "top_k": {"top_k": 50, "min_p": 0.01}}
    figures: dict[str, object] = {}
    for name, parameters in forms.items():
        tokens = {}
        for where, device in (("here", jax.devices()[0]), ("cpu", jax.devices("cpu")[0])):
            with jax.default_device(device):
                here = jnp.asarray(logits)
                if parameters is None:
                    chosen = jax.jit(greedy)(here)
                else:
                    kind = platform if where == "here" else "cpu"
                    rows = rows_of(batch, **parameters)  # type: ignore[arg-type]
                    chosen = jax.jit(partial(sample, platform=kind))(here, rows)
                tokens[where] = np.asarray(chosen)
        differ = int((tokens["here"] != tokens["cpu"]).sum())
        if differ:
            raise WrongAnswer(f"{name}: {differ} of {batch} tokens are not the CPU's")
        figures[name] = f"{batch} equal"
    return figures


def rows_of(batch: int, top_k: float = 0, top_p: float = 1, min_p: float = 0) -> SamplingRows:
    return SamplingRows(
        temperature=jnp.full(batch, 0.8, jnp.float32),
        top_k=jnp.full(batch, int(top_k), jnp.int32),
        top_p=jnp.full(batch, top_p, jnp.float32),
        min_p=jnp.full(batch, min_p, jnp.float32),
        seed=jnp.asarray(np.arange(2 * batch, dtype=np.uint32).reshape(batch, 2)),
        child=jnp.zeros(batch, jnp.int32),
        position=jnp.arange(batch, dtype=jnp.int32) + 3,
    )


def packed(day: Day, name: str) -> Figures:
    """Checks that packing and unpacking a block gives the same bits as on the CPU."""
    shape = (1, 4, 2, 64, 64) if day.small else (1, 16, 8, 512, 128)
    values = np.random.default_rng(0).normal(size=shape).astype(jnp.bfloat16)
    stamp = stamp_array(BlockStamp(key=7, valid_tokens=shape[3]))
    how, found = codec(name), {}
    for where, device in (("here", jax.devices()[0]), ("cpu", jax.devices("cpu")[0])):
        with jax.default_device(device):
            first = jnp.int32(0)
            leaves = jax.jit(how.encode)(jnp.asarray(values), jnp.asarray(stamp), first)
            back = jax.jit(lambda *leaves: how.decode(leaves, jnp.dtype("bfloat16")))(*leaves)
            if not bool(jax.jit(how.verify)(leaves, jnp.asarray(stamp), first)):
                raise WrongAnswer(f"codec {name}: its own sum does not hold on {device}")
            found[where] = [np.asarray(array).tobytes() for array in (*leaves, back)]
    if found["here"] != found["cpu"]:
        raise WrongAnswer(f"codec {name}: other bytes than on the CPU")
    return {"bytes": sum(len(part) for part in found["here"][:-1]), "of": values.nbytes}
