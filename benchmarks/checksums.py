"""What do the checksums of a hand-off cost, on the side that computes KV and on the side that
inserts it?

    python -m benchmarks.checksums --dtype=float32 --rounds=9 --name=checksums

Prefill: one chunk of 512 tokens of the 124.7M model on one CPU device, with and without the
checksums of its KV. Insert: one block of 512 tokens of half the model's layers, written to pages
and read back for the checksum, compared with the write alone. Both variants alternate round by
round. A figure is the median over rounds of (without / with), so 1 means no cost."""

import time
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks import plain_loop
from benchmarks.measure import paired, save
from jdisagg.clock import MonotonicClock
from jdisagg.config import InstanceConfig, Mode
from jdisagg.engine.replica import build_replica
from jdisagg.executor import insert_program
from jdisagg.executor.block_sums import PrefillSums
from jdisagg.executor.mesh_executor import MeshExecutor, MeshRole
from jdisagg.layout.axes import Layout
from jdisagg.messages.step_commands import (
    ConnectPeer,
    InsertBlock,
    OfferSpec,
    PrefillChunk,
    PrefillRow,
    PullBlock,
)
from jdisagg.ops.parameters import layout_mesh
from jdisagg.transfer.in_process import InProcessChannel
from models.catalog import read_config
from models.checkpoint import LoadedModel
from models.decoder import init_model
from models.hf_config import HfConfig

_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Weights and KV.")
_ROUNDS = flags.DEFINE_integer("rounds", 9, "Interleaved rounds.")
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")

TOKENS, PAGE, KEY = 512, 128, 0x1234567890ABCDEF


class NoSums(PrefillSums):
    """Stands in for the checksum programs: blocks are returned without a checksum."""

    def run(
        self, group: int, block: jax.Array, positions: jax.Array, segment: jax.Array, key: jax.Array
    ) -> jax.Array:
        return key


def instance(
    name: str, loaded: LoadedModel, role: MeshRole, channel: InProcessChannel
) -> MeshExecutor:
    config = InstanceConfig(
        page_size=PAGE,
        pages_per_rank=8,
        slots_per_rank=1,
        chunk_tokens=TOKENS,
        min_chunk_tokens=TOKENS,
    )
    return build_replica(
        name, config, Mode.DISAGGREGATED, loaded, role, channel, 2 * TOKENS, 2
    ).executor


def main(_: list[str]) -> None:
    model = init_model(
        read_config(HfConfig(plain_loop.MEASURED_MODEL, "the measured model")),
        jax.random.key(0),
        dtype=_DTYPE.value,
    )
    loaded = LoadedModel(
        model, layout_mesh(Layout(), plain_loop.KV_HEADS, jax.devices()[:1]), Layout()
    )
    channel = InProcessChannel(MonotonicClock())
    prefills = [
        instance(name, loaded, MeshRole(True, False, emit=True), channel)
        for name in ("with", "without")
    ]
    prefills[1]._sums = prefills[1]._prefill._stages[0][1]._sums = NoSums(
        prefills[1].programs, prefills[1]._pool, prefills[1]._groups, 16
    )
    figures: dict[str, object] = {"dtype": _DTYPE.value}
    figures["prefill 512"] = rounds(*(lambda mesh=mesh: prefill(mesh) for mesh in prefills))
    figures["insert 512, half the layers"] = rounds(*inserts(prefills[0], loaded, channel))
    for name, value in figures.items():
        if isinstance(value, dict):
            ours, theirs = (
                cast("dict[str, float]", value[side])["median_ms"] for side in ("ours", "theirs")
            )
            print(
                f"{name:32s} speed {value['speed']:.4f}  with {ours:.2f} ms  without {theirs:.2f}"
                f" ms  {value['rounds']}"
            )
    if _NAME.value:
        print(save(_NAME.value, figures))
    for mesh in prefills:
        mesh.close()


_ids = iter(range(1, 1 << 30))


def prefill(mesh: MeshExecutor, keep: bool = False) -> int:
    """Runs one prefill chunk, and offers and withdraws its KV."""
    offer_ids = (next(_ids), next(_ids))
    offers = tuple(
        OfferSpec(offer_id, group, 0, TOKENS) for group, offer_id in enumerate(offer_ids)
    )
    row = PrefillRow(
        0,
        0,
        0,
        tuple(int(token) for token in np.arange(TOKENS) % 1000),
        0,
        (0, 1, 2, 3),
        offers=offers,
    )
    mesh.issue_and_wait(PrefillChunk(0, TOKENS, (row,), KEY))
    if not keep:
        for offer_id in offer_ids:
            mesh._channel.release(offer_id)
    return offer_ids[0]


def inserts(
    source: MeshExecutor, loaded: LoadedModel, channel: InProcessChannel
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Inserts one pulled block repeatedly, with and without reading back and checksums."""
    offer_id = prefill(source, keep=True)

    def inserting(summed: bool) -> Callable[[], None]:
        mesh = instance("insert", loaded, MeshRole(False, True), channel)
        mesh.issue_and_wait(ConnectPeer(0, "p", source.card))
        command = InsertBlock(0, offer_id, 0, 0, TOKENS, TOKENS, 0, (4, 5, 6, 7), KEY)
        mesh.issue_and_wait(PullBlock(0, offer_id, 0, 0, TOKENS, 60.0, "p"))
        arrays = mesh._pulls[offer_id].arrays()
        jax.block_until_ready(arrays)
        local_sum = insert_program.local_sum
        if not summed:  # what is not summed is not read back
            insert_program.local_sum = lambda block, stamp, token, counts: jnp.zeros(2, jnp.uint32)
        mesh._blocks.insert(command, arrays).block_until_ready()
        insert_program.local_sum = local_sum

        def once() -> None:
            mesh._blocks.insert(command, arrays).block_until_ready()
            jax.block_until_ready(mesh._pool.layers)

        return once

    return inserting(True), inserting(False)


def rounds(ours: Callable[[], object], theirs: Callable[[], object]) -> dict[str, object]:
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(_ROUNDS.value + 2):
        for side, run in enumerate((ours, theirs)):
            started = time.perf_counter()
            run()
            if number > 1:
                seconds[side].append(time.perf_counter() - started)
    return paired(*seconds)


if __name__ == "__main__":
    app.run(main)
