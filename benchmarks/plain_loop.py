"""The baseline: a plain jitted loop over the measured model, without a server, pages, slots or
sampling.

Each layer has fixed cache slots [B, K, S, H], and decode attends to all S positions. Prefill runs
one sequence at a time, with attention in query blocks of 256 rows over causal prefixes. Layers are
unrolled, all state is donated, and decoding is greedy. The loop is written independently of the
engine's programs, with the tuning that is known to be best on CPU: kernels [in, out] in float32 and
[out, in] in bfloat16, and a duplicated row behind a barrier for a single bfloat16 row. Weights are
taken from an engine model, so both must give the same tokens."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, FFN, VOCABULARY = 12, 768, 12, 4, 64, 2048, 32000
THETA, EPSILON, BLOCK = 10000.0, 1e-5, 256

MEASURED_MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "intermediate_size": FFN,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "rms_norm_eps": EPSILON,
    "rope_theta": THETA,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}

Cache = list[tuple[jax.Array, jax.Array]]


class LoopWeights(NamedTuple):
    embedding: jax.Array
    norm: jax.Array
    head: jax.Array
    layers: tuple[dict[str, jax.Array], ...]


def weights_of(model: Any) -> LoopWeights:
    """Returns the arrays of an engine model (models.decoder.Decoder), with kernels in their stored
    orientation."""

    def layer(one: Any) -> dict[str, jax.Array]:
        names = {
            "q": one.attention.q,
            "k": one.attention.k,
            "v": one.attention.v,
            "o": one.attention.o,
        }
        names |= {"gate": one.mlp.gate, "up": one.mlp.up, "down": one.mlp.down}
        kernels = {name: part.kernel[...] for name, part in names.items()}
        return kernels | {
            "norm1": one.attention_norm.weight[...],
            "norm2": one.mlp_norm.weight[...],
        }

    return LoopWeights(
        model.stem.embedding[...],
        model.stem.norm.weight[...],
        model.stem.head.kernel[...],
        tuple(layer(one) for one in model.layers),
    )


def new_cache(batch: int, positions: int, dtype: str) -> Cache:
    shape = (batch, KV_HEADS, positions, HEAD)
    return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(LAYERS)]


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    scaled = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + EPSILON)
    return scaled.astype(x.dtype) * scale[None, :]


def _dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
    if x.dtype == jnp.bfloat16:
        contract = (((1,), (1,)), ((), ()))
        if x.shape[0] == 1:
            return lax.dot_general(
                lax.optimization_barrier(jnp.concatenate((x, x))), kernel, contract
            )[:1]
        return lax.dot_general(x, kernel, contract)
    return x @ kernel


def _rope(x_TNH: jax.Array, positions_T: jax.Array) -> jax.Array:
    frequencies = THETA ** (-jnp.arange(0, HEAD, 2, dtype=jnp.float32) / HEAD)
    angles = positions_T.astype(jnp.float32)[:, None] * frequencies[None, :]
    cos, sin = (
        jnp.cos(angles)[:, None, :].astype(x_TNH.dtype),
        jnp.sin(angles)[:, None, :].astype(x_TNH.dtype),
    )
    a, b = jnp.split(x_TNH, 2, axis=-1)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


def _qkv(
    x: jax.Array, layer: dict[str, jax.Array], positions: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    h, rows = _norm(x, layer["norm1"]), x.shape[0]
    q = _rope(_dot(h, layer["q"]).reshape(rows, HEADS, HEAD), positions)
    k = _rope(_dot(h, layer["k"]).reshape(rows, KV_HEADS, HEAD), positions)
    return q, k, _dot(h, layer["v"]).reshape(rows, KV_HEADS, HEAD)


def _rest(x: jax.Array, o: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
    x = x + _dot(o.reshape(x.shape[0], HEADS * HEAD), layer["o"])
    h = _norm(x, layer["norm2"])
    return x + _dot(jax.nn.silu(_dot(h, layer["gate"])) * _dot(h, layer["up"]), layer["down"])


def _token(x: jax.Array, weights: LoopWeights) -> jax.Array:
    return jnp.argmax(_dot(_norm(x, weights.norm), weights.head), axis=-1).astype(jnp.int32)


@partial(jax.jit, donate_argnums=1)
def prefill(
    weights: LoopWeights, cache: Cache, tokens_T: jax.Array, row: jax.Array
) -> tuple[Cache, jax.Array]:
    """Prefills one sequence into cache row `row` from position 0. Returns the next token [1]."""
    count = tokens_T.shape[0]
    positions = jnp.arange(count, dtype=jnp.int32)
    x = weights.embedding[tokens_T]
    new: Cache = []
    for layer, (k_cache, v_cache) in zip(weights.layers, cache, strict=True):
        q, k, v = _qkv(x, layer, positions)
        q = q.reshape(count, KV_HEADS, HEADS // KV_HEADS, HEAD).transpose(1, 2, 0, 3)
        k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
        outputs = []
        for low in range(0, count, BLOCK):
            high = min(low + BLOCK, count)
            scores = (
                jnp.einsum(
                    "kgth,ksh->kgts",
                    q[:, :, low:high],
                    k[:, :high],
                    preferred_element_type=jnp.float32,
                )
                * HEAD**-0.5
            )
            seen = positions[None, :high] <= positions[low:high, None]
            weight = jax.nn.softmax(jnp.where(seen[None, None], scores, -jnp.inf), axis=-1).astype(
                x.dtype
            )
            outputs.append(jnp.einsum("kgts,ksh->kgth", weight, v[:, :high]))
        x = _rest(x, jnp.concatenate(outputs, axis=2).transpose(2, 0, 1, 3), layer)
        zero = jnp.zeros((), jnp.int32)
        start = (row, zero, zero, zero)
        new.append(
            (
                lax.dynamic_update_slice(k_cache, k[None], start),
                lax.dynamic_update_slice(v_cache, v[None], start),
            )
        )
    return new, _token(x[-1:], weights)


@partial(jax.jit, donate_argnums=1)
def decode(
    weights: LoopWeights, cache: Cache, tokens_B: jax.Array, positions_B: jax.Array
) -> tuple[Cache, jax.Array]:
    """Runs one step of all rows: writes each row's position, attends to the whole slot under a
    mask, and returns the next tokens [B]."""
    batch = tokens_B.shape[0]
    rows = jnp.arange(batch)
    x = weights.embedding[tokens_B]
    seen = jnp.arange(cache[0][0].shape[2])[None, :] <= positions_B[:, None]
    new: Cache = []
    for layer, (k_cache, v_cache) in zip(weights.layers, cache, strict=True):
        q, k, v = _qkv(x, layer, positions_B)
        k_cache = k_cache.at[rows, :, positions_B].set(
            k, mode="promise_in_bounds", unique_indices=True
        )
        v_cache = v_cache.at[rows, :, positions_B].set(
            v, mode="promise_in_bounds", unique_indices=True
        )
        new.append((k_cache, v_cache))
        q = q.reshape(batch, KV_HEADS, HEADS // KV_HEADS, HEAD)
        scores = (
            jnp.einsum("bkgh,bksh->bkgs", q, k_cache, preferred_element_type=jnp.float32)
            * HEAD**-0.5
        )
        weight = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1).astype(
            x.dtype
        )
        x = _rest(x, jnp.einsum("bkgs,bksh->bkgh", weight, v_cache), layer)
    return new, _token(x, weights)
