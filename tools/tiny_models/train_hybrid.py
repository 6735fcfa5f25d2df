"""Trains a tiny hybrid model (Gated DeltaNet and attention, as in Qwen3.5) with its next-token
layer, and writes it in Hugging Face form. It is not shipped: benchmarks of drafts measure it.

    python -m tools.tiny_models.train_hybrid --destination=/tmp/hybrid

The serving implementation itself is trained (`models/decoder.py`), on the text and with the
tokenizer of the shipped models. The next-token layer learns the model's own distribution, twice in
a chain, and the model learns nothing from it. Needs the `train` extra (Optax)."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from jdisagg.model_api import AttendOptions, Shards
from jdisagg.ops.dense_attention import dense_causal_attend
from jdisagg.ops.dense_recurrence import recur_from_the_beginning
from launch.console import run
from launch.flags import define
from launch.shipped import SHIPPED_MODEL
from models.catalog import read_config
from models.decoder import Decoder, init_model
from models.gated_delta import GatedDeltaNet
from models.hf_config import HfConfig
from models.hf_weights import MTP_NAMES, find_source
from models.parameter_tree import parameter_shapes
from tools.tiny_models.export import write_json
from tools.tiny_models.network import PackedRows, TinyShape
from tools.tiny_models.tokenizer import BEGIN_ID, END_IDS, write_tokenizer
from tools.tiny_models.train import places_to_write
from tools.tiny_models.training import Schedule, batches, mean_loss, optimizer_of

CONTEXT = 1024
FIELDS: dict[str, object] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 1280,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 1,
    "bos_token_id": BEGIN_ID,
    "eos_token_id": END_IDS[0],
    "dtype": "float32",
}
_ROW_TOKENS = 256
_DEPTH = 2
_EVERY = 25

flags = define("steps", "seed", "minutes", "destination", required=("destination",), seed=0)


def untrained(fields: dict[str, object], seed: int) -> Decoder:
    config = replace(read_config(HfConfig(fields, "the tiny hybrid")), next_token=True)
    model = init_model(config, jax.random.key(seed))
    for layer in model.layers:
        if isinstance(layer.attention, GatedDeltaNet):  # some heads remember long
            bias = layer.attention.decay_bias
            bias[...] = jnp.linspace(-5.0, 1.0, bias[...].shape[0])
    return model


def train_model(model: Decoder, tokenizer: Tokenizer, schedule: Schedule) -> Decoder:
    graph, parameters = nnx.split(model)
    optimizer = optimizer_of(schedule)

    def step(parameters: nnx.State, state: optax.OptState, rows: PackedRows):
        gradients, told = jax.grad(
            lambda parameters: _objective(nnx.merge(graph, parameters), rows), has_aux=True
        )(parameters)
        with jax.numpy_dtype_promotion("standard"):  # Optax counts on it
            updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, told

    run_step = jax.jit(step, donate_argnums=(0, 1))
    state, began = jax.jit(optimizer.init)(parameters), monotonic()
    recent: list[jax.Array] = []
    shape = TinyShape("llama", layers=0, context_tokens=schedule.row_tokens)
    steps = islice(batches(shape, tokenizer, schedule), schedule.steps)
    for number, rows in enumerate(steps, start=1):
        parameters, state, told = run_step(parameters, state, rows)
        recent.append(told)
        if number % _EVERY == 0 or number == schedule.steps:
            loss, *agreed = np.mean(np.asarray(jax.device_get(recent)), axis=0)
            parts = ", ".join(f"{part:.3f}" for part in agreed)
            print(
                f"step {number}/{schedule.steps}  loss {loss:.4f}  first choices of the next-token"
                f" layer that agree, by depth: {parts}  {monotonic() - began:.0f} s",
                flush=True,
            )
            recent.clear()
        if monotonic() - began > schedule.seconds_at_most:
            break
    return nnx.merge(graph, parameters)


def _attend(
    q_TNH: jax.Array, k_TKH: jax.Array | None, v_TKH: jax.Array | None, **how: Unpack[AttendOptions]
) -> jax.Array:
    return dense_causal_attend(q_TNH, k_TKH, v_TKH, **how)


def _objective(model: Decoder, rows: PackedRows) -> tuple[jax.Array, jax.Array]:
    """Each row is one sequence, although it has several documents."""
    shards, next_token = Shards(), model.next_token
    assert next_token is not None
    positions_T = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)

    def hidden(tokens_T: jax.Array) -> jax.Array:
        x_TD = model.stem.embed(tokens_T, shards)
        for layer, kept in zip(model.layers, model.kv_spec.layers, strict=False):
            recur = recur_from_the_beginning(
                kept.state, model.kv_spec.dtype, tokens_T.shape[0], shards
            )
            x_TD = layer(x_TD, positions_T, _attend, shards, recur=recur)
        return model.stem.normed(x_TD)

    def drafted(tokens_T: jax.Array, y_TD: jax.Array) -> jax.Array:
        embedded_TD = jax.lax.stop_gradient(model.stem.embed(tokens_T, shards))
        before_TD = jnp.roll(y_TD, 1, axis=0)
        return next_token(embedded_TD, before_TD, positions_T, _attend, shards)

    def likelihoods(y_RTD: jax.Array) -> jax.Array:
        logits_RTV = jax.vmap(lambda y_TD: model.stem.project(y_TD, shards))(y_RTD)
        return jax.nn.log_softmax(logits_RTV)

    y_RTD = jax.vmap(hidden)(rows.tokens)
    wanted_RTV = likelihoods(y_RTD)
    loss = total = mean_loss(wanted_RTV, rows.targets)
    wanted_RTV, agreed = jax.lax.stop_gradient(wanted_RTV), []
    y_RTD = jax.lax.stop_gradient(y_RTD)
    for depth in range(1, _DEPTH + 1):
        y_RTD = jax.vmap(drafted)(rows.tokens, y_RTD)
        got_RTV = likelihoods(y_RTD)
        counted_RT = (positions_T[None] >= depth) & (rows.targets >= 0)
        count = jnp.sum(counted_RT, dtype=jnp.float32)
        differ_RT = jnp.sum(jnp.exp(wanted_RTV) * (wanted_RTV - got_RTV), axis=-1)
        same_RT = jnp.argmax(wanted_RTV, -1) == jnp.argmax(got_RTV, -1)
        total = total + jnp.sum(jnp.where(counted_RT, differ_RT, 0.0)) / count / _DEPTH
        agreed.append(jnp.sum(same_RT & counted_RT, dtype=jnp.float32) / count)
    return total, jnp.stack((loss, *agreed))


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
        name = _stored_name(name, len(model.layers))
        named.setdefault(name, np.zeros(shape, np.float32)).reshape(-1)[at] = np.asarray(leaf)
    return named


def _stored_name(name: str, layers: int) -> str:
    prefix = f"model.layers.{layers}."
    if not name.startswith(prefix):
        return name
    inner = name.removeprefix(prefix)
    for theirs, usual in MTP_NAMES.items():
        if usual and inner.startswith(usual):
            return f"mtp.{theirs}{inner.removeprefix(usual)}"
    return f"mtp.layers.0.{inner}"


def write(model: Decoder, fields: dict[str, object], tokenizer: Tokenizer, folder: Path) -> None:
    save_file(tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", fields)
    ends = {"bos_token_id": BEGIN_ID, "eos_token_id": list(END_IDS)}
    write_json(folder / "generation_config.json", ends)
    write_tokenizer(tokenizer, folder, CONTEXT)


def main() -> None:
    folder, _ = places_to_write(flags.destination, None)
    tokenizer = Tokenizer.from_file(str(Path(SHIPPED_MODEL) / "tokenizer.json"))
    schedule = Schedule(
        flags.steps or 500,
        flags.seed,
        tokens_per_step=2 * _ROW_TOKENS,
        row_tokens=_ROW_TOKENS,
        seconds_at_most=60 * flags.minutes,
    )
    model = train_model(untrained(FIELDS, flags.seed), tokenizer, schedule)
    write(model, FIELDS, tokenizer, folder)


if __name__ == "__main__":
    run(main, flags)
