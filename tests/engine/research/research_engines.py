"""Engines of the research face on the golden checkpoints, and what others say of these: Hugging
Face transformers (tests/golden), and a dense forward pass on one device."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.engine.research.face import DecoderLayout, Engine, MeshSizes, PrefillLayout
from jdisagg.engine.research.kv_cache import KVCache
from jdisagg.layout.axes import Layout
from jdisagg.ops.dense_attention import dense_causal_attend
from jdisagg.scheduler.page_ledger import PageLedger
from models.checkpoint import LoadedModel, load_model
from tests.golden.arrays import arrays_of

GOLDEN = Path(__file__).parents[2] / "golden"
CHUNK_TOKENS, CONTEXT_TOKENS = 16, 112
NAME, NEW_TOKENS = "llama_tied", 8
TP4, DP2 = PrefillLayout(tp=4), DecoderLayout(dp=2)

EngineOf = Callable[[str], AbstractContextManager[Engine]]
# (layer, k [T, K, H], v [T, K, H]) -> what is attended to instead
Change = Callable[[int, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class Expected(NamedTuple):
    """`logits` [T, V] of each position of the prompt; `greedy`: what follows it."""

    prompt: list[int]
    greedy: list[int]
    logits: np.ndarray


def hugging_face(name: str) -> Expected:
    found = arrays_of(GOLDEN / name / "expected.npz")
    return Expected(found["prompt"].tolist(), found["greedy"].tolist(), found["logits"])


def open_engine(
    name: str,
    dtype: str = "float32",
    fingerprint: str = "",
    sessions_per_rank: int = 4,
    tokenizer: Any = None,
    kv_dtype: str = "",
) -> Engine:
    def load(layout: Layout, devices: Sequence[jax.Device]) -> LoadedModel:
        return load_model(GOLDEN / name, layout, devices, dtype=dtype, kv_dtype=kv_dtype)

    sizes = MeshSizes(8, CHUNK_TOKENS, sessions_per_rank, CONTEXT_TOKENS)
    return Engine(load, tokenizer, sizes=sizes, fingerprint=fingerprint)


def dense_pass(
    name: str, tokens: Sequence[int], change: Change = lambda layer, k, v: (k, v)
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """Logits [T, V], and the keys (after rope) and values [T, K, H] of each layer, from one dense
    pass on one device."""
    model = load_model(GOLDEN / name, Layout(), jax.devices()[:1]).model
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def attend(q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, **how: Any) -> jax.Array:
        k_TKH, v_TKH = change(len(seen), k_TKH, v_TKH)
        seen.append((np.asarray(k_TKH), np.asarray(v_TKH)))
        return dense_causal_attend(q_TNH, k_TKH, v_TKH, **how)

    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    logits = model(jnp.asarray(tokens, jnp.int32), positions, attend)  # type: ignore[arg-type]
    return np.asarray(logits), seen


def ledgers(engine: Engine) -> list[PageLedger]:
    return [ledger for instance in engine.instances for ledger in instance.ledgers]


def assert_same_kv(one: KVCache, other: KVCache, atol: float = 0.0) -> None:
    for field in ("token_ids", "positions", "bytes"):
        assert getattr(one, field) == getattr(other, field)
    for index in range(one.layers):
        ours, theirs = one.layer(index).components, other.layer(index).components
        assert ours.keys() == theirs.keys()
        for name in ours:
            both = [np.asarray(part[name]).astype(np.float32) for part in (ours, theirs)]
            np.testing.assert_allclose(*both, rtol=0, atol=atol)
