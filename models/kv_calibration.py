"""Measures the magnitudes of a model's keys and values over sample tokens. `models/kv_scales.py`
chooses KV scales from these magnitudes.

The loaded layers run on their mesh, one after the other over whole sequences, with dense attention
and no cache (`ops/dense_attention.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jdisagg.errors import BrokenModelError, ConfigError
from jdisagg.layout.axes import TP_AXES, Layout
from jdisagg.layout.kv_spec import KVLayer
from jdisagg.model_api import AttendOptions, Shards
from jdisagg.ops.dense_attention import dense_causal_attend
from jdisagg.ops.dense_recurrence import recur_from_the_beginning
from jdisagg.ops.parameters import param_specs
from models.checkpoint import LoadedModel
from models.kv_scales import KVScales, scaled_components

_WHOLE = PartitionSpec()


@dataclass(frozen=True)
class _Place:
    mesh: Mesh
    layout: Layout
    dtype: str

    @property
    def shards(self) -> Shards:
        first, ep = self.mesh.devices.flat[0], self.layout.expert_axes()
        return Shards(TP_AXES, ("dp",), ep, first.platform, first.device_kind)


def largest_kept(loaded: LoadedModel, sequences: Sequence[Sequence[int]]) -> KVScales:
    """Returns, for each layer and kv head, the largest magnitude of keys and of values over the
    sample.

    Args:
        loaded: Model whose KV is stored unscaled, in the type of the weights.
        sequences: Token ids of whole sequences. Each distinct length compiles a program, and memory
            grows with the square of the length, so use few lengths, at most a few thousand.

    Raises:
        BrokenModelError: A value is not finite.
        ConfigError: Layers read tokens or the KV of other layers.
    """
    model = loaded.model
    if model.reads_tokens or any(layer.source is not None for layer in model.kv_spec.layers):
        raise ConfigError(
            f"KV scales of {model.config.family} cannot be measured, because its layers read tokens"
            " or the KV of other layers; serve it without them"
        )
    place = _Place(loaded.mesh, loaded.layout, model.kv_spec.dtype)
    stem = nnx.split(model.stem)
    layers = [nnx.split(layer) for layer in model.layers]
    found = [
        {part.name: np.zeros(max(1, part.heads), np.float32) for part in scaled_components(layer)}
        for layer in model.kv_spec.layers
    ]
    for tokens in sequences:
        x_TD = _embedded(stem[1], jnp.asarray(tokens, jnp.int32), graph=stem[0], place=place)
        for index, (graph, state) in enumerate(layers):
            kept = model.kv_spec.layers[index]
            x_TD, sizes = _through(state, x_TD, graph=graph, place=place, kept=kept)
            for name, largest in found[index].items():
                np.maximum(largest, np.asarray(sizes[name]), out=largest)
                if not np.isfinite(largest).all():
                    raise BrokenModelError(
                        f"layer {index} computes {name} that is not finite; check the checkpoint"
                        " and its dtype"
                    )
    return found


@partial(jax.jit, static_argnames=("graph", "place"))
def _embedded(
    state: nnx.State, ids_T: jax.Array, *, graph: nnx.GraphDef, place: _Place
) -> jax.Array:
    def local(state: nnx.State, ids_T: jax.Array) -> jax.Array:
        return nnx.merge(graph, state).embed(ids_T, place.shards)

    specs = _specs(graph, state, place)
    return jax.shard_map(
        local, mesh=place.mesh, in_specs=(specs, _WHOLE), out_specs=_WHOLE, check_vma=False
    )(state, ids_T)


@partial(jax.jit, static_argnames=("graph", "place", "kept"))
def _through(
    state: nnx.State, x_TD: jax.Array, *, graph: nnx.GraphDef, place: _Place, kept: KVLayer
) -> tuple[jax.Array, dict[str, jax.Array]]:
    names = [part.name for part in scaled_components(kept)]

    def local(state: nnx.State, x_TD: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        sizes: dict[str, jax.Array] = {}

        def attend(
            q_TNH: jax.Array,
            k_TKH: jax.Array | None,
            v_TKH: jax.Array | None,
            **how: Unpack[AttendOptions],
        ) -> jax.Array:
            assert k_TKH is not None
            kept_parts = (k_TKH,) if v_TKH is None else (k_TKH, v_TKH)
            for name, values in zip(names, kept_parts, strict=True):
                sizes[name] = jnp.max(jnp.abs(values.astype(jnp.float32)), axis=(0, 2))
            return dense_causal_attend(q_TNH, k_TKH, v_TKH, **how)

        tokens, shards = x_TD.shape[0], place.shards
        recur = recur_from_the_beginning(kept.state, place.dtype, tokens, shards)
        positions_T = jnp.arange(tokens, dtype=jnp.int32)
        layer = nnx.merge(graph, state)
        return layer(x_TD, positions_T, attend, shards, recur=recur), sizes

    heads = PartitionSpec("kv")
    parts = scaled_components(kept)
    shares = {part.name: heads if part.heads else _WHOLE for part in parts}
    return jax.shard_map(
        local,
        mesh=place.mesh,
        in_specs=(_specs(graph, state, place), _WHOLE),
        out_specs=(_WHOLE, shares),
        check_vma=False,
    )(state, x_TD)


def _specs(graph: nnx.GraphDef, state: nnx.State, place: _Place) -> nnx.State:
    specs = param_specs(nnx.merge(graph, state), place.layout)
    return jax.tree.unflatten(jax.tree.structure(state), specs)
