"""Trains the next-token layer of the shipped dense model and adds it to the model's folder.

    python -m tools.tiny_models.train_next_token --destination=models/tiny/llama

The model itself does not change: the layer alone is trained, on the text that the model was trained
on. It learns the model's own distribution, because a draft is accepted if it is the model's token.
It is applied twice, the second time to its own hidden states, because it drafts several tokens in a
chain. Needs the `train` extra (Optax).

The shipped layer was trained with seed 0 for 1200 steps: 4.5 minutes of CPU time, beside other work
on the machine. Its first choice is then the model's in 92 % of the training text."""

from itertools import islice
from pathlib import Path
from time import monotonic

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tokenizers import Tokenizer

from launch.console import run
from launch.flags import define
from tools.tiny_models.export import add_next_token_layer, read_dense
from tools.tiny_models.network import SHAPES, PackedRows, TinyNetwork, TinyNextTokenLayer
from tools.tiny_models.training import Schedule, batches, optimizer_of

_DEPTH = 2
_EVERY = 100

flags = define("steps", "seed", "destination", required=("destination",), seed=0)


def train_layer(
    network: TinyNetwork, tokenizer: Tokenizer, schedule: Schedule
) -> TinyNextTokenLayer:
    """Trains a next-token layer of `network`, whose weights do not change."""
    target, frozen = nnx.split(network)
    graph, parameters = nnx.split(TinyNextTokenLayer(network.shape, schedule.seed))
    optimizer = optimizer_of(schedule)

    def objective(
        parameters: nnx.State, frozen: nnx.State, rows: PackedRows
    ) -> tuple[jax.Array, jax.Array]:
        model, layer = nnx.merge(target, frozen), nnx.merge(graph, parameters)
        embedding_VD = model.embedding[...]
        y_RTD, _ = jax.lax.stop_gradient(model.hidden(rows))
        wanted_RTV = jax.nn.log_softmax(y_RTD @ embedding_VD.T)
        losses, agreed = [], []
        for depth in range(1, _DEPTH + 1):
            y_RTD = layer(embedding_VD[rows.tokens], y_RTD, rows)
            got_RTV = jax.nn.log_softmax(y_RTD @ embedding_VD.T)
            counted_RT = (rows.positions >= depth) & (rows.targets >= 0)
            differ_RT = jnp.sum(jnp.exp(wanted_RTV) * (wanted_RTV - got_RTV), axis=-1)
            same_RT = jnp.argmax(wanted_RTV, -1) == jnp.argmax(got_RTV, -1)
            count = jnp.sum(counted_RT, dtype=jnp.float32)
            losses.append(jnp.sum(jnp.where(counted_RT, differ_RT, 0.0)) / count)
            agreed.append(jnp.sum(same_RT & counted_RT, dtype=jnp.float32) / count)
        return jnp.mean(jnp.stack(losses)), jnp.stack(agreed)

    def step(parameters: nnx.State, state: optax.OptState, frozen: nnx.State, rows: PackedRows):
        gradients, agreed = jax.grad(objective, has_aux=True)(parameters, frozen, rows)
        with jax.numpy_dtype_promotion("standard"):  # Optax counts on it
            updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, agreed

    run_step = jax.jit(step, donate_argnums=(0, 1))
    state, began = jax.jit(optimizer.init)(parameters), monotonic()
    recent: list[jax.Array] = []
    steps = islice(batches(network.shape, tokenizer, schedule), schedule.steps)
    for number, rows in enumerate(steps, start=1):
        parameters, state, agreed = run_step(parameters, state, frozen, rows)
        recent.append(agreed)
        if number % _EVERY == 0:
            parts = np.mean(np.asarray(jax.device_get(recent)), axis=0)
            told = ", ".join(f"{part:.3f}" for part in parts)
            print(
                f"step {number}/{schedule.steps}  first choices that agree, by depth: {told} "
                f" {monotonic() - began:.0f} s",
                flush=True,
            )
            recent.clear()
    return nnx.merge(graph, parameters)


def main() -> None:
    folder = Path(flags.destination)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    network = read_dense(folder, SHAPES["llama"])
    layer = train_layer(network, tokenizer, Schedule(flags.steps or 1200, flags.seed))
    add_next_token_layer(layer, folder)


if __name__ == "__main__":
    run(main, flags)
