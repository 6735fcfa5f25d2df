"""How fast does KV move between two processes, against a plain TCP copy and the bare transfer engine on the same bytes?

    python -m benchmarks.handoff --megabytes=16,64 --rounds=7 --name=handoff

Part 1, per layout pair and size, interleaved round by round, seconds of a hand-off of some blocks, all asked for at once:
- tcp: as many bytes over one plain socket into a buffer;
- bare: the same pieces from the same devices to the same devices, posted and pulled on a plain server and connection;
- pulled: the channel, from `pull` to global arrays on the devices;
- inserted: that, and each block written into pages, read back and its keyed sum on the host.
Part 2: what of the transfer shows after a prefill that computes like an accelerator (it sleeps, the host is idle), with each block
offered as it is done, and with all offered at the end. Insertion included.
Both processes share this machine's cores and memory: rates say nothing about a network, ratios say what our layers cost.
"""

import secrets
import socket
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection, Listener

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks.handoff_sender import TRANSPORTS, Bare, BarePiece, Case, LinkThread, OfferBlocks, Prepare, Release, Tcp
from benchmarks.measure import save
from jdisagg.engine.host_memory import keep_freed_memory
from jdisagg.executor.block_programs import BlockPrograms
from jdisagg.executor.page_pool import PagePool
from jdisagg.executor.programs import Programs
from jdisagg.layout.kv_spec import KVComponent, KVLayer, KVSpec
from jdisagg.scheduler.commands import InsertBlock
from jdisagg.transfer.boxes import head_granule, plan_handoff, rank_placement
from jdisagg.transfer.channel import PullTarget, block_sharding, resident_zeros
from jdisagg.transfer.transfer_engine import EngineOptions

_MEGABYTES = flags.DEFINE_list("megabytes", ["16", "64"], "Bytes of a hand-off.")
_BLOCKS = flags.DEFINE_integer("blocks", 4, "In how many blocks.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Interleaved rounds.")
_PAIRS = flags.DEFINE_list(
    "pairs", ["tp=1>tp=1", "tp=1>tp=2", "tp=2>tp=1", "tp=4>tp=4", "tp=4>dp=2;tp=2", "dp=2;tp=2>dp=4"], "source>destination, ';' for ','."
)
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")

PAGE = 128
SECONDS = 60.0


class Receiver:
    """This process's side of one case."""

    def __init__(self, sender: Connection, link: LinkThread, bare_address: str, tcp: socket.socket) -> None:
        self._sender, self._link, self._tcp = sender, link, tcp
        self._bare_server = EngineOptions(transports=TRANSPORTS).start_server()
        self._bare = self._bare_server.connect(bare_address)
        self._buffer = memoryview(bytearray(64 << 20))

    def prepare(self, case: Case, blocks: int) -> None:
        self.case, self.blocks = case, blocks
        self.mesh = case.mesh(case.destination)
        card = self.order(Prepare(case, blocks))
        self.peer = f"sender#{secrets.token_hex(4)}"
        self._link.channel.connect(self.peer, card)
        self.rank = self.mesh.shape["dp"] - 1
        granule = head_granule(case.kv_heads, card.head_shards, self.mesh.shape["kv"])
        zeros = resident_zeros(self.mesh, case.components, granule, case.tokens, case.head_size, jnp.dtype(case.dtype))
        self.target = PullTarget(zeros, self.rank, peer=self.peer)
        spec = KVSpec(
            tuple(
                KVLayer((KVComponent("k", case.kv_heads, case.head_size), KVComponent("v", case.kv_heads, case.head_size)))
                for _ in range(case.layers)
            ),
            case.dtype,
        )
        pages = blocks * case.tokens // PAGE
        self.programs = Programs(self.mesh)
        self.insert = BlockPrograms(self.programs, PagePool(self.mesh, spec, pages, PAGE, 1), (range(case.layers),))
        self.pages = tuple(np.random.default_rng(0).permutation(pages).tolist())
        self._bare_plan(card.rank_boxes(0, (1, case.components, case.kv_heads, case.tokens, case.head_size)), card.devices, granule)

    def _bare_plan(self, source: dict, devices: tuple[int, ...], granule: int) -> None:
        whole = (self.mesh.shape["dp"], self.case.components, self.case.kv_heads, self.case.tokens, self.case.head_size)
        destination = rank_placement(block_sharding(self.mesh), whole, self.rank)
        apart = {-1 - device: box for device, box in destination.items()}
        here = {device.id: device for device in self.mesh.devices.flat}
        self._bare_pieces, self._bare_avals = [], []
        for piece in plan_handoff(source, apart, granule).pieces:
            heads = piece.box[2]
            self._bare_pieces.append(BarePiece(devices.index(piece.source), heads))
            shape = (1, self.case.components, heads[1] - heads[0], self.case.tokens, self.case.head_size)
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

    def bare(self) -> float:
        ids = tuple(secrets.randbits(62) for _ in range(self.blocks))
        self.order(Bare(ids, tuple(self._bare_pieces)))
        started = time.perf_counter()
        arrays = [array for pull_id in ids for array in self._bare.pull(pull_id, self._bare_avals)]
        while not all(array.is_ready() for array in arrays):  # pyright: ignore[reportAttributeAccessIssue]
            time.sleep(2e-4)
        return time.perf_counter() - started

    def pulled(self, insert: bool) -> float:
        ids = tuple(secrets.randbits(63) for _ in range(self.blocks))
        self.order(OfferBlocks(ids))
        started = time.perf_counter()
        self.receive(ids, insert)
        seconds = time.perf_counter() - started
        self.order(Release(ids))
        return seconds

    def exposed(self, compute_seconds: float, at_end: bool) -> float:
        """Seconds between the end of computing and the last block's sum on the host."""
        ids = tuple(secrets.randbits(63) for _ in range(self.blocks))
        self._sender.send(OfferBlocks(ids, compute_seconds, at_end))
        self.receive(ids, insert=True)
        ended = time.monotonic()
        exposed = ended - self._sender.recv()
        self.order(Release(ids))
        return exposed

    def receive(self, ids: tuple[int, ...], insert: bool) -> None:
        """All pulls at once; each block is inserted as it comes, and the sums are read at the end, as the worker's loop does."""
        pulls = {number: self._link.channel.pull(offer_id, self.target, SECONDS) for number, offer_id in enumerate(ids)}
        sums: list[jax.Array] = []
        while pulls:
            for number in [number for number, pull in pulls.items() if pull.is_ready()]:
                arrays, tokens = pulls.pop(number).arrays(), self.case.tokens
                if insert:
                    command = InsertBlock(0, ids[number], self.rank, 0, tokens, tokens, number * tokens, self.pages, 1, self.peer)
                    sums.append(self.insert.insert(command, arrays))
                    sums[-1].copy_to_host_async()
            time.sleep(2e-4)
        for found in sums:
            assert np.asarray(found)[2] == 0


def measure(receiver: Receiver, pair: str, megabytes: float) -> dict[str, object]:
    source, destination = (side.replace(";", ",") for side in pair.split(">"))
    # A token of 4 layers is 16 KiB: blocks of at most 1024 tokens, more layers beyond.
    per_block = megabytes * 2**20 / _BLOCKS.value
    tokens = min(1024, int(per_block // 2**14))
    case = Case(source, destination, tokens=tokens, layers=max(4, int(per_block // (tokens * 2**12))))
    receiver.prepare(case, _BLOCKS.value)
    ways = {"tcp": receiver.tcp, "bare": receiver.bare, "pulled": lambda: receiver.pulled(False), "inserted": lambda: receiver.pulled(True)}
    rounds = [{name: run() for name, run in ways.items()} for _ in range(_ROUNDS.value + 2)][2:]
    total = case.nbytes * _BLOCKS.value
    figures: dict[str, object] = {"bytes": total, "pieces": len(receiver._bare_pieces) * _BLOCKS.value}
    for name in ways:
        seconds = [one[name] for one in rounds]
        figures[name] = {
            "GB/s": round(total / statistics.median(seconds) / 1e9, 3),
            "of bare": round(statistics.median(one["bare"] / one[name] for one in rounds), 3),
            "ms": [round(1e3 * value, 2) for value in seconds],
        }
    compute = max(0.05, 2 * statistics.median(one["inserted"] for one in rounds) / _BLOCKS.value)
    pairs = [(receiver.exposed(compute, at_end=False), receiver.exposed(compute, at_end=True)) for _ in range(_ROUNDS.value)]
    figures["exposed"] = {
        "compute ms a block": round(1e3 * compute, 1),
        "as computed, ms": [round(1e3 * one, 2) for one, _ in pairs],
        "all at the end, ms": [round(1e3 * one, 2) for _, one in pairs],
        "hidden": round(1 - statistics.median(one / other for one, other in pairs), 3),
    }
    return figures


def main(_: list[str]) -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    keep_freed_memory()
    with Listener(("127.0.0.1", 0)) as listener:
        port = listener.address[1]  # type: ignore[misc]
        child = subprocess.Popen([sys.executable, "-c", f"from benchmarks.handoff_sender import main; main({port})"])
        try:
            sender = listener.accept()
            _, bare_address, tcp_port = sender.recv()
            receiver = Receiver(sender, LinkThread(), bare_address, socket.create_connection(("127.0.0.1", tcp_port)))
            figures: dict[str, object] = {}
            for megabytes in map(float, _MEGABYTES.value):
                for pair in _PAIRS.value:
                    name = f"{pair.replace(';', ',').replace('>', ' -> ')}, {megabytes:g} MB"
                    found = figures[name] = measure(receiver, pair, megabytes)
                    rates = "  ".join(
                        f"{way} {found[way]['GB/s']} ({found[way]['of bare']})" for way in ("tcp", "bare", "pulled", "inserted")
                    )  # type: ignore[index]
                    print(f"{name:28s} GB/s (of bare): {rates}  hidden {found['exposed']['hidden']}", flush=True)  # type: ignore[index]
            sender.send(None)
        finally:
            child.terminate()
            child.wait()
    if _NAME.value:
        print(save(_NAME.value, figures))


if __name__ == "__main__":
    app.run(main)
