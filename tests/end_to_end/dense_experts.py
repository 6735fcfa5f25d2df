"""The experts that a dense pass chooses for the tokens of a sequence."""

from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jdisagg.layout.axes import Layout
from jdisagg.model_api import Shards
from jdisagg.ops.dense_attention import dense_causal_attend
from jdisagg.prompt.experts import ChosenExperts
from jdisagg.request import TokenLogprobs
from models.checkpoint import load_model


@partial(jax.jit, static_argnums=0)
def _chosen(graphdef: nnx.GraphDef, weights: nnx.State, tokens_T: jax.Array) -> jax.Array:
    by_layer: list[jax.Array] = []
    model = nnx.merge(graphdef, weights)
    places = jnp.arange(len(tokens_T), dtype=jnp.int32)
    model(tokens_T, places, dense_causal_attend, Shards(record=by_layer.append))
    return jnp.stack(by_layer, axis=1)


@lru_cache(maxsize=4)
def _model(directory: Path) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(load_model(directory, Layout(), jax.devices()[-1:]).model)


def dense_experts(directory: Path, tokens: Sequence[int]) -> np.ndarray:
    """Returns int [T, layers with experts, experts of a token]."""
    padded = np.zeros(-(-len(tokens) // 128) * 128, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_chosen(*_model(directory), padded))[: len(tokens)]


def as_array(found: ChosenExperts | None) -> np.ndarray:
    assert found is not None
    return np.frombuffer(found.data, found.dtype).reshape(-1, found.layers, found.chosen)


def told(logprobs: Sequence[TokenLogprobs]) -> np.ndarray:
    return as_array(ChosenExperts.joined(one.experts for one in logprobs))
