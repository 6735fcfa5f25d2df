"""The serving implementation (`models/decoder.py`) as a network that is trained: whole rows without
a cache, and the tensors of a checkpoint from its parameters."""

from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jdisagg.model_api import AttendOptions, Shards
from jdisagg.ops.dense_recurrence import recur_from_the_beginning
from models.decoder import Decoder
from models.hf_weights import MTP_NAMES, find_source
from models.next_token import NextTokenLayer
from models.parameter_tree import parameter_shapes
from tools.tiny_models.network import PackedRows

_SHARDS = Shards()


class ServedNetwork(nnx.Module):
    """A decoder. With recurrent layers a row must be one sequence (`joins`)."""

    def __init__(self, model: Decoder) -> None:
        self.model = model

    @property
    def context_tokens(self) -> int:
        return self.model.context_tokens

    @property
    def joins(self) -> bool:
        return any(layer.recurrent for layer in self.model.config.layers)

    def __call__(self, rows: PackedRows) -> tuple[jax.Array, jax.Array]:
        """Returns logits, float32 [R, T, V], and zero, because no router is trained."""
        return self.logits(self.hidden(rows)), jnp.zeros(())

    def hidden(self, rows: PackedRows) -> jax.Array:
        """Returns the output of the final norm, [R, T, D]."""
        return jax.vmap(self._hidden)(rows)

    def embed(self, rows: PackedRows) -> jax.Array:
        return jax.vmap(lambda tokens_T: self.model.stem.embed(tokens_T, _SHARDS))(rows.tokens)

    def logits(self, y_RTD: jax.Array) -> jax.Array:
        return jax.vmap(lambda y_TD: self.model.stem.project(y_TD, _SHARDS))(y_RTD)

    def _hidden(self, row: PackedRows) -> jax.Array:
        x_TD = self.model.stem.embed(row.tokens, _SHARDS)
        dtype, tokens = self.model.kv_spec.dtype, row.tokens.shape[0]
        for layer, kept in zip(self.model.layers, self.model.kv_spec.layers, strict=False):
            recur = recur_from_the_beginning(kept.state, dtype, tokens, _SHARDS)
            attend = ChainAttention(row.documents)
            x_TD = layer(x_TD, row.positions, attend, _SHARDS, recur=recur)
        return self.model.stem.normed(x_TD)


def drafted(
    layer: NextTokenLayer, embedded_RTD: jax.Array, y_RTD: jax.Array, rows: PackedRows, depth: int
) -> list[jax.Array]:
    """Returns the layer's hidden states of the first `depth` drafts of a chain: each [R, T, D], for
    the token after each. `y_RTD` are the model's. The first token of a document has none before
    it."""
    known_RT1 = (rows.positions > 0)[..., None]
    embedded_RTD = jnp.where(known_RT1, embedded_RTD, 0.0)

    def of_row(embedded_TD: jax.Array, y_TD: jax.Array, row: PackedRows) -> list[jax.Array]:
        attend, made = ChainAttention(row.documents), []
        for _ in range(depth):
            before_TD = jnp.where((row.positions > 0)[:, None], jnp.roll(y_TD, 1, axis=0), 0.0)
            y_TD = layer(embedded_TD, before_TD, row.positions, attend, _SHARDS)
            made.append(y_TD)
        return made

    return jax.vmap(of_row)(embedded_RTD, y_RTD, rows)


class ChainAttention:
    """Attention within the documents of a row. Each further call is of the next draft of a chain,
    with keys and values from the hidden states of the draft before. As in a decode step, such a
    draft attends to those of its own chain, and to those of the first call before."""

    def __init__(self, documents_T: jax.Array) -> None:
        self._documents_T = documents_T
        self._made: list[tuple[jax.Array, jax.Array]] = []

    def __call__(
        self,
        q_TNH: jax.Array,
        k_TKH: jax.Array | None,
        v_TKH: jax.Array | None,
        **how: Unpack[AttendOptions],
    ) -> jax.Array:
        assert k_TKH is not None and v_TKH is not None and how["window"] is None
        tokens, heads, size = q_TNH.shape
        self._made.append((k_TKH.swapaxes(0, 1), v_TKH.swapaxes(0, 1)))
        (first_KSH, values_KSH), *later = self._made
        q_KTGH = q_TNH.reshape(tokens, k_TKH.shape[1], -1, size).swapaxes(0, 1) * how["scale"]
        q_KGTH = q_KTGH.swapaxes(1, 2)
        order_T = jnp.arange(tokens)
        own_TS = self._documents_T[:, None] == self._documents_T[None]
        seen_TS = own_TS & (order_T[:, None] - order_T[None] >= len(later))
        scores_KGTS = q_KGTH @ first_KSH.swapaxes(1, 2)[:, None]
        scores_KGTS = jnp.where(seen_TS[None, None], scores_KGTS, -1e9)
        chain = [
            (jnp.roll(k_KTH, back, axis=1)[:, None], jnp.roll(v_KTH, back, axis=1)[:, None])
            for back, (k_KTH, v_KTH) in enumerate(reversed(later))
        ]
        own = [jnp.sum(q_KGTH * k_K1TH, axis=-1, keepdims=True) for k_K1TH, _ in chain]
        mix_KGTS = jax.nn.softmax(jnp.concatenate((scores_KGTS, *own), axis=-1), axis=-1)
        out_KGTH = mix_KGTS[..., :tokens] @ values_KSH[:, None]
        for number, (_, v_K1TH) in enumerate(chain):
            out_KGTH += mix_KGTS[..., tokens + number, None] * v_K1TH
        return out_KGTH.transpose(2, 0, 1, 3).reshape(tokens, heads, -1)


def tensors(model: Decoder) -> dict[str, np.ndarray]:
    """Returns the parameters under the tensor names of transformers. The loader's own sources say
    where each value is."""
    named: dict[str, np.ndarray] = {}
    leaves = jax.tree.leaves(nnx.state(model))
    for parameter, leaf in zip(parameter_shapes(model), leaves, strict=True):
        source = find_source(parameter, model.config, {})
        ((name, shape),) = source.needs().items()
        places = np.arange(np.prod(shape)).reshape(shape)
        whole = tuple(slice(0, size) for size in parameter.shape)
        at = source.read(lambda _, index, places=places: places[index], whole)
        if model.config.mtp_aside:
            name = _name_aside(name, len(model.layers))
        named.setdefault(name, np.zeros(shape, np.float32)).reshape(-1)[at] = np.asarray(leaf)
    return named


def _name_aside(name: str, layers: int) -> str:
    """Returns the name of a next-token layer's tensor in families that keep it aside."""
    prefix = f"model.layers.{layers}."
    if not name.startswith(prefix):
        return name
    inner = name.removeprefix(prefix)
    for theirs, usual in MTP_NAMES.items():
        if usual and inner.startswith(usual):
            return f"mtp.{theirs}{inner.removeprefix(usual)}"
    return f"mtp.layers.0.{inner}"
