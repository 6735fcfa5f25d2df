"""The sender's process of `benchmarks.handoff`: obeys its parent over a local socket, one command
at a time.

offer    its block under an id, at once or after some time of "computing" (a sleep: an accelerator's work costs the host nothing)
bare     the same pieces, cut before, posted on a plain transfer server, the way anyone would who knows what the other side wants
tcp      as many bytes over a plain socket
The first two answer with two moments (one clock for all processes of a machine): before the first
block was there, and after the last."""  # noqa: E501

import asyncio
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Client

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_day.lent import driver
from jdisagg.clock import MonotonicClock
from jdisagg.config import ServiceConfig
from jdisagg.engine.host_settings import hand_over_quickly, keep_freed_memory
from jdisagg.layout.axes import Layout
from jdisagg.layout.mesh_card import KvEnd, MeshCard
from jdisagg.service.kv_link import GrpcKvLink
from jdisagg.service.server import GrpcServer
from jdisagg.transfer.channel import BlockStamp, block_sharding
from jdisagg.transfer.device_memory import LentMemory
from jdisagg.transfer.jax_transfer import JaxTransferChannel
from jdisagg.transfer.memories import Memories
from jdisagg.transfer.nixl_memory import nixl_memory
from jdisagg.transfer.shared_memory import SharedMemory
from jdisagg.transfer.transfer_engine import EngineOptions

TRANSPORTS = 4


@dataclass(frozen=True)
class Case:
    """A block of `layers` layers' K and V, and how it lies on the two sides."""

    source: str
    destination: str
    kv_heads: int = 8
    layers: int = 4
    tokens: int = 1024
    head_size: int = 128
    dtype: str = "bfloat16"

    @property
    def components(self) -> int:
        return 2 * self.layers

    @property
    def nbytes(self) -> int:
        return (
            self.components
            * self.kv_heads
            * self.tokens
            * self.head_size
            * jnp.dtype(self.dtype).itemsize
        )

    def mesh(self, layout: str) -> jax.sharding.Mesh:
        parsed = Layout.parse(layout)
        devices = jax.devices()[: parsed.devices]
        return jax.sharding.Mesh(
            np.array(devices).reshape(parsed.mesh_shape(self.kv_heads)), ("dp", "kv", "rep")
        )


@dataclass(frozen=True)
class BarePiece:
    """`heads` of the block, from one of the sender's devices, as index into its mesh."""

    device: int
    heads: tuple[int, int]


@dataclass(frozen=True)
class Prepare:
    case: Case
    blocks: int


@dataclass(frozen=True)
class OfferBlocks:
    """`compute_seconds` pass before each block is there; `at_end`: all are offered after the last.
    With more ids than blocks, each block is offered several times."""

    offer_ids: tuple[int, ...]
    compute_seconds: float = 0.0
    at_end: bool = False


@dataclass(frozen=True)
class Release:
    offer_ids: tuple[int, ...]


@dataclass(frozen=True)
class Bare:
    """One posting a block: each under its id."""

    pull_ids: tuple[int, ...]
    pieces: tuple[BarePiece, ...]


@dataclass(frozen=True)
class Tcp:
    nbytes: int


class LinkThread:
    """An event loop in a thread with this process's KV link and its server, and the channel on
    it. `channel`: how its KV can be had: "memory", shared as by workers of one host; "cuda", from
    device to device; "nixl"; else through the engine."""

    def __init__(self, channel: str) -> None:
        self._channel = channel
        self._ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        self._ready.wait()

    async def _serve(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        memories = _memories(self._channel)
        self.end = memories.end(f"127.0.0.1:{port}", secrets.randbits(64))
        link = GrpcKvLink(self.end)
        self.channel = JaxTransferChannel(
            MonotonicClock(), self.end, link, transports=TRANSPORTS, memories=memories
        )
        link.deliver_to(self.channel)
        server = GrpcServer((link.service(),), ServiceConfig(port=port), self.end.boot_id)
        await server.start()
        self._ready.set()
        await asyncio.Event().wait()


def _memories(channel: str) -> Memories:
    match channel:
        case "memory":
            return Memories(SharedMemory())
        case "cuda":
            return Memories(device=LentMemory(driver()))
        case "nixl":
            return Memories(nixl=nixl_memory(channel, "127.0.0.1"))
        case _:
            return Memories()


def card(mesh: jax.sharding.Mesh, end: KvEnd) -> MeshCard:
    devices = tuple(int(device.id) for device in mesh.devices.flat)
    dp, kv, rep = mesh.devices.shape
    return MeshCard((dp, kv, rep), devices, (0,) * len(devices), (end,), TRANSPORTS)


def main(port: int, channel: str) -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    keep_freed_memory()
    hand_over_quickly()
    parent = Client(("127.0.0.1", port))
    link = LinkThread(channel)
    bare = EngineOptions(transports=TRANSPORTS).start_server()
    plain = socket.create_server(("127.0.0.1", 0))
    parent.send((link.end, bare.address(), plain.getsockname()[1]))
    stream, _ = plain.accept()
    payload = memoryview(bytes(64 << 20))
    blocks: list[jax.Array] = []
    case, computed = Case("tp=1", "tp=1"), 0.0
    while (command := parent.recv()) is not None:
        answer: object = None
        match command:
            case Prepare():
                case, sharding = (
                    command.case,
                    block_sharding(command.case.mesh(command.case.source)),
                )
                shape = (
                    sharding.mesh.shape["dp"],
                    case.components,
                    case.kv_heads,
                    case.tokens,
                    case.head_size,
                )
                make = jax.jit(
                    lambda key: jax.random.normal(key, shape, case.dtype), out_shardings=sharding
                )
                blocks = [
                    jax.block_until_ready(make(jax.random.key(number)))
                    for number in range(command.blocks)
                ]
                answer = card(sharding.mesh, link.end)  # type: ignore[arg-type]
            case OfferBlocks():
                began = time.monotonic()
                for number, offer_id in enumerate(command.offer_ids):
                    time.sleep(command.compute_seconds)
                    computed = time.monotonic()
                    if not command.at_end:
                        link.channel.offer(offer_id, blocks[number % len(blocks)], 0, BlockStamp())
                if command.at_end:
                    for number, offer_id in enumerate(command.offer_ids):
                        link.channel.offer(offer_id, blocks[number % len(blocks)], 0, BlockStamp())
                answer = began, computed
            case Release():
                for offer_id in command.offer_ids:
                    link.channel.release(offer_id)
            case Bare():
                cut = jax.block_until_ready(
                    [_bare_pieces(block, command.pieces) for block in blocks]
                )
                began = time.monotonic()
                for number, pull_id in enumerate(command.pull_ids):
                    bare.await_pull(pull_id, cut[number % len(cut)])
                answer = began, began
            case Tcp():
                left = command.nbytes
                while left:
                    left -= stream.send(payload[: min(left, len(payload))])
        parent.send(answer)


def _bare_pieces(block: jax.Array, pieces: tuple[BarePiece, ...]) -> list[jax.Array]:
    shards = {shard.device.id: shard for shard in block.addressable_shards}
    devices = [int(device.id) for device in block.sharding.mesh.devices.flat]  # type: ignore[attr-defined]
    cut: list[jax.Array] = []
    for piece in pieces:
        shard = shards[devices[piece.device]]
        first = shard.index[2].indices(block.shape[2])[0]
        low, high = (head - first for head in piece.heads)
        whole = high - low == shard.data.shape[2]
        cut.append(shard.data if whole else shard.data[:, :, low:high])
    return cut
