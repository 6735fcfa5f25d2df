"""Measures KV transfer between two processes, against a TCP copy and the bare transfer engine with
the same bytes.

    python -m benchmarks.handoff --megabytes=16,64 --rounds=7 --name=handoff

The bytes are the KV of a prompt, for a model of 32 layers with 8 KV heads of 128 in bfloat16 (128
KiB per token). They are divided into blocks by layers as in serving (engine/limits.py,
scheduler/blocks.py), or as --groups states. Part 1 measures the seconds of a hand-off for each pair
of layouts and each size, interleaved by round:
- tcp: the same number of bytes over one socket into a buffer;
- bare: the same pieces between the same devices, posted and pulled on a plain server and
  connection;
- pulled: through the channel, to global arrays on the devices;
- inserted: as pulled, and each block is written into pages, read back, and its keyed checksum is
  read by the host.
All but tcp are measured in two orders. "ahead": pulls are requested before the blocks are offered
(or posted) and computed, as in serving; the time starts when the blocks are computed. "late": all
blocks are computed and offered (or posted) before; the time starts at the first pull. The goals
apply to "ahead". "four ahead": four hand-offs at once, with four times the bytes, each into its own
pages.

Part 2 measures which share of the transfer is visible after a prefill that computes like an
accelerator (it sleeps, so that the host is idle): with each block offered when it is computed, and
with all blocks offered at the end. It includes insertion. The same bytes and prefill seconds are
divided into 4, 8, 16 and 32 layer groups. The last of n blocks cannot be hidden, about 1/n of the
time. Both processes share the cores and memory of this machine. The rates therefore do not apply to
a network; the ratios show the cost of our layers."""

import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks.handoff_sender import (
    TRANSPORTS,
    Bare,
    BarePiece,
    Case,
    OfferBlocks,
    Prepare,
    Release,
    Tcp,
    link_thread,
)
from benchmarks.measure import save
from jdisagg.engine.host_settings import hand_over_quickly, keep_freed_memory
from jdisagg.engine.limits import GROUP_BYTES, groups_of_layers
from jdisagg.executor.block_programs import BlockPrograms
from jdisagg.executor.block_sums import Found
from jdisagg.executor.page_pool import PagePool
from jdisagg.executor.programs import Programs
from jdisagg.layout.kv_spec import KVSpec
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.layout.reshard_plan import head_granule, plan_handoff
from jdisagg.messages.step_commands import InsertBlock
from jdisagg.node.kv_endpoint import KvEndpoint
from jdisagg.scheduler.blocks import bands, even_runs
from jdisagg.transfer.channel import PullTarget, block_sharding, rank_placement, resident_zeros
from jdisagg.transfer.transfer_engine import EngineOptions
from tests.layout.plans import rank_boxes

_MEGABYTES = flags.DEFINE_list("megabytes", ["16", "64"], "Bytes of a hand-off.")
_GROUPS = flags.DEFINE_integer(
    "groups", None, "In how many blocks by layers; without: as serving chooses."
)
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Interleaved rounds.")
_PAIRS = flags.DEFINE_list(
    "pairs",
    ["tp=1>tp=1", "tp=1>tp=2", "tp=2>tp=1", "tp=4>tp=4", "tp=4>dp=2;tp=2", "dp=2;tp=2>dp=4"],
    "source>destination, ';' for ','.",
)
_HIDDEN = flags.DEFINE_list("hidden", ["4", "8", "16", "32"], "Layer groups of part 2.")
_CHANNEL = flags.DEFINE_enum(
    "channel",
    "memory",
    ["memory", "engine", "nixl"],
    "Shared memory, as on one host, or the engine, or NIXL (UCX_TLS=tcp: as between hosts).",
)
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")

PAGE = 128
SECONDS = 60.0
SPEC = KVSpec.attention(32, 8, 128, "bfloat16")
COPIES = 4
PREFILL_SECONDS = 0.24
WAYS = (
    "tcp",
    "bare ahead",
    "pulled ahead",
    "inserted ahead",
    "bare late",
    "pulled late",
    "inserted late",
    "bare four",
    "inserted four",
)
# until what was asked for has arrived at the sender; in serving, a block computes meanwhile
SETTLE_SECONDS = 0.02


class Receiver:
    """The receiving process's side of one case."""

    def __init__(
        self, sender: Connection, link: KvEndpoint, bare_address: str, tcp: socket.socket
    ) -> None:
        self._sender, self._link, self._tcp = sender, link, tcp
        self._bare_server = EngineOptions(transports=TRANSPORTS).start_server()
        self._bare = self._bare_server.connect(bare_address)
        self._buffer = memoryview(bytearray(64 << 20))

    def prepare(self, case: Case) -> None:
        """Prepares for `case`, which describes one block. There is one block per layer group."""
        self.case, self.blocks = case, len(SPEC.layers) // case.layers
        self.mesh = case.mesh(case.destination)
        card = self.order(Prepare(case, self.blocks))
        assert isinstance(card, MeshCard)
        self.peer = f"sender#{secrets.token_hex(4)}"
        self._link.channel.connect(self.peer, card)
        self.rank = self.mesh.shape["dp"] - 1
        granule = head_granule(case.kv_heads, card.head_shards, self.mesh.shape["kv"])
        zeros = resident_zeros(
            self.mesh, case.components, granule, case.tokens, case.head_size, jnp.dtype(case.dtype)
        )
        self.target = PullTarget(zeros, self.rank, peer=self.peer)
        pages = -(-case.tokens // PAGE)
        programs = Programs(self.mesh)
        pool = PagePool(programs, SPEC, COPIES * pages, PAGE, 1)
        self.insert = BlockPrograms(programs, pool, even_runs(len(SPEC.layers), self.blocks))
        self.pages = (
            np.random.default_rng(0).permutation(COPIES * pages).reshape(COPIES, pages).tolist()
        )
        self._bare_plan(
            rank_boxes(card, 0, (1, case.components, case.kv_heads, case.tokens, case.head_size)),
            card.devices,
            granule,
        )

    def _bare_plan(self, source: dict, devices: tuple[int, ...], granule: int) -> None:
        whole = (
            self.mesh.shape["dp"],
            self.case.components,
            self.case.kv_heads,
            self.case.tokens,
            self.case.head_size,
        )
        destination = rank_placement(block_sharding(self.mesh), whole, self.rank)
        apart = {-1 - device: box for device, box in destination.items()}
        here = {device.id: device for device in self.mesh.devices.flat}
        self._bare_pieces, self._bare_avals = [], []
        for piece in plan_handoff(source, apart, granule):
            heads = piece.box[2]
            self._bare_pieces.append(BarePiece(devices.index(piece.source), heads))
            shape = (
                1,
                self.case.components,
                heads[1] - heads[0],
                self.case.tokens,
                self.case.head_size,
            )
            place = jax.sharding.SingleDeviceSharding(here[-1 - piece.destination])
            self._bare_avals.append(jax.ShapeDtypeStruct(shape, self.case.dtype, sharding=place))

    def order(self, command: object) -> object:
        self._sender.send(command)
        return self._sender.recv()

    def tcp(self) -> float:
        nbytes = self.case.nbytes * self.blocks
        started = time.perf_counter()
        self._sender.send(Tcp(nbytes))
        while nbytes:
            nbytes -= self._tcp.recv_into(self._buffer[: min(nbytes, len(self._buffer))])
        seconds = time.perf_counter() - started
        self._sender.recv()
        return seconds

    def bare(self, ahead: bool, copies: int = 1) -> float:
        ids = tuple(secrets.randbits(62) for _ in range(copies * self.blocks))
        order = Bare(ids, tuple(self._bare_pieces))
        if not ahead:
            self.order(order)
        started = time.monotonic()
        arrays = [array for pull_id in ids for array in self._bare.pull(pull_id, self._bare_avals)]
        if ahead:
            time.sleep(SETTLE_SECONDS)
            self._sender.send(order)
        while not all(array.is_ready() for array in arrays):  # pyright: ignore[reportAttributeAccessIssue]
            time.sleep(2e-4)
        ended = time.monotonic()
        return ended - (self._sender.recv()[0] if ahead else started)

    def pulled(self, insert: bool, ahead: bool, copies: int = 1) -> float:
        ids = tuple(secrets.randbits(63) for _ in range(copies * self.blocks))
        if not ahead:
            self.order(OfferBlocks(ids))
        started = time.monotonic()
        self.receive(ids, insert, OfferBlocks(ids) if ahead else None)
        ended = time.monotonic()
        if ahead:
            started = self._sender.recv()[0]
        self.order(Release(ids))
        return ended - started

    def exposed(self, compute_seconds: float, at_end: bool) -> float:
        """Returns the seconds from the end of the computation to the last block's checksum on the
        host."""
        ids = tuple(secrets.randbits(63) for _ in range(self.blocks))
        self.receive(ids, True, OfferBlocks(ids, compute_seconds, at_end))
        ended = time.monotonic()
        exposed = ended - self._sender.recv()[1]
        self.order(Release(ids))
        return exposed

    def receive(self, ids: tuple[int, ...], insert: bool, order: OfferBlocks | None) -> None:
        """Starts all pulls at once, inserts each block as it arrives, and reads the checksums at
        the end, as the worker's loop does. `order` is sent to the sender after the pulls have
        started."""
        pulls = {
            number: self._link.channel.pull(offer_id, self.target, SECONDS)
            for number, offer_id in enumerate(ids)
        }
        sums: list[jax.Array] = []
        if order is not None:
            time.sleep(SETTLE_SECONDS)
            self._sender.send(order)
        while pulls:
            for number in [number for number, pull in pulls.items() if pull.is_ready()]:
                arrays, tokens = pulls.pop(number).arrays(), self.case.tokens
                if insert:
                    copy, group = divmod(number, self.blocks)
                    pages = tuple(self.pages[copy])
                    command = InsertBlock(
                        0, ids[number], self.rank, group, tokens, tokens, 0, pages, 1, self.peer
                    )
                    sums.append(self.insert.insert(command, arrays))
                    sums[-1].copy_to_host_async()
            time.sleep(2e-4)
        for found in sums:
            assert Found.read(found).intact


def case_of(pair: str, megabytes: float, groups: int) -> Case:
    """Returns one block of a prompt with KV of this size."""
    source, destination = (side.replace(";", ",") for side in pair.split(">"))
    return Case(
        source,
        destination,
        tokens=int(megabytes * 2**20 / SPEC.bytes_per_token),
        layers=len(SPEC.layers) // groups,
    )


def exposed(receiver: Receiver, pair: str, megabytes: float, groups: int) -> dict[str, object]:
    receiver.prepare(case_of(pair, megabytes, groups))
    seconds = PREFILL_SECONDS / groups
    pairs = [
        (receiver.exposed(seconds, at_end=False), receiver.exposed(seconds, at_end=True))
        for _ in range(_ROUNDS.value + 2)
    ][2:]
    return {
        "as computed, ms": [round(1e3 * one, 2) for one, _ in pairs],
        "all at the end, ms": [round(1e3 * one, 2) for _, one in pairs],
        "hidden": round(1 - statistics.median(one / other for one, other in pairs), 3),
    }


def measure(receiver: Receiver, pair: str, megabytes: float) -> dict[str, object]:
    groups = _GROUPS.value or len(
        bands(groups_of_layers(SPEC, None), int(megabytes * 2**20), GROUP_BYTES)
    )
    receiver.prepare(case_of(pair, megabytes, groups))
    ways: dict[str, Callable[[], float]] = {"tcp": receiver.tcp}
    for order, ahead in (("ahead", True), ("late", False)):
        ways[f"bare {order}"] = lambda ahead=ahead: receiver.bare(ahead)
        ways[f"pulled {order}"] = lambda ahead=ahead: receiver.pulled(False, ahead)
        ways[f"inserted {order}"] = lambda ahead=ahead: receiver.pulled(True, ahead)
    ways["bare four"] = lambda: receiver.bare(True, COPIES)
    ways["inserted four"] = lambda: receiver.pulled(True, True, COPIES)
    rounds = [{name: run() for name, run in ways.items()} for _ in range(_ROUNDS.value + 2)][2:]
    total = receiver.case.nbytes * groups
    figures: dict[str, object] = {
        "bytes": total,
        "layer groups": groups,
        "pieces": len(receiver._bare_pieces) * groups,
    }
    for name in ways:
        seconds = [one[name] / (COPIES if name.endswith("four") else 1) for one in rounds]
        bare = "bare ahead" if name == "tcp" else f"bare {name.split()[-1]}"
        figures[name] = {
            "GB/s": round(total / statistics.median(seconds) / 1e9, 3),
            "of bare": round(statistics.median(one[bare] / one[name] for one in rounds), 3),
            "ms": [round(1e3 * value, 2) for value in seconds],
        }
    figures["exposed"] = {
        f"{groups} groups": exposed(receiver, pair, megabytes, groups)
        for groups in map(int, _HIDDEN.value)
    }
    return figures


def main(_: list[str]) -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    keep_freed_memory()
    hand_over_quickly()
    with Listener(("127.0.0.1", 0)) as listener:
        port = listener.address[1]  # type: ignore[misc]
        program = f"from benchmarks.handoff_sender import main; main({port}, {_CHANNEL.value!r})"
        child = subprocess.Popen([sys.executable, "-c", program])
        try:
            sender = listener.accept()
            _, bare_address, tcp_port = sender.recv()
            receiver = Receiver(
                sender,
                link_thread(_CHANNEL.value),
                bare_address,
                socket.create_connection(("127.0.0.1", tcp_port)),
            )
            figures: dict[str, object] = {}
            for megabytes in map(float, _MEGABYTES.value):
                for pair in _PAIRS.value:
                    name = f"{pair.replace(';', ',').replace('>', ' -> ')}, {megabytes:g} MB"
                    found = figures[name] = measure(receiver, pair, megabytes)
                    ways: dict[str, dict[str, object]] = {way: found[way] for way in WAYS}  # type: ignore[misc]
                    rates = "  ".join(
                        f"{way} {seen['GB/s']} ({seen['of bare']})" for way, seen in ways.items()
                    )
                    hidden = [one["hidden"] for one in found["exposed"].values()]  # type: ignore[attr-defined]
                    print(f"{name:28s} GB/s (of bare): {rates}  hidden {hidden}", flush=True)  # type: ignore[index]
            sender.send(None)
        finally:
            child.terminate()
            child.wait()
    if _NAME.value:
        print(save(_NAME.value, figures))


if __name__ == "__main__":
    app.run(main)
