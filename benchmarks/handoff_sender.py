"""The sending process of `benchmarks.handoff`. It runs its parent's commands, which arrive over a
local socket, one at a time:

    offer    offers its blocks under their ids, before they are computed, as a prefill does, or
        afterwards
    bare     posts the same pieces on a plain transfer server, as a program that knows the
        receiver's layout could
    tcp      sends the same number of bytes over a plain socket

The first two reply with two times (on a clock that all processes of a machine share): before the
first block was computed, and after the last. Computation is a sleep, because an accelerator's work
costs the host nothing."""

import functools
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.config import ServiceConfig
from jdisagg.engine.host_settings import hand_over_quickly, keep_freed_memory
from jdisagg.layout.axes import Layout
from jdisagg.layout.mesh_card import KvEnd, MeshCard
from jdisagg.model_api import Device
from jdisagg.node.kv_endpoint import TRANSPORTS, KvEndpoint
from jdisagg.transfer.channel import BlockStamp, block_sharding
from jdisagg.transfer.negotiated_channel import Memories
from jdisagg.transfer.nixl_memory import nixl_memory
from jdisagg.transfer.shared_memory import SharedMemory
from jdisagg.transfer.transfer_engine import EngineOptions


@dataclass(frozen=True)
class Case:
    """A block with K and V of `layers` layers, and its layouts at the sender and the receiver."""

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
    """`heads` heads of the block on one of the sender's devices, given by its index in the mesh."""

    device: int
    heads: tuple[int, int]


@dataclass(frozen=True)
class Prepare:
    case: Case
    blocks: int


@dataclass(frozen=True)
class OfferBlocks:
    """Offers the blocks. Each block is computed after `compute_seconds`. `at_end`: all blocks are
    offered after the last one is computed, otherwise before the first. If there are more ids than
    blocks, each block is offered several times."""

    offer_ids: tuple[int, ...]
    compute_seconds: float = 0.0
    at_end: bool = False


@dataclass(frozen=True)
class Release:
    offer_ids: tuple[int, ...]


@dataclass(frozen=True)
class Bare:
    """Posts the pieces of each block under an id of its own."""

    pull_ids: tuple[int, ...]
    pieces: tuple[BarePiece, ...]


@dataclass(frozen=True)
class Tcp:
    nbytes: int


class Gate:
    """Makes arrays that are "computed" at a chosen moment without work: they wait for a number that
    this process pulls from itself."""

    def __init__(self) -> None:
        self._server = EngineOptions().start_server()
        self._inlet = self._server.connect(self._server.address())

    def computing(self, sources: Sequence[jax.Array], apart: bool) -> list["Computing"]:
        """Returns copies of the sources that wait. With `apart` each copy waits separately,
        otherwise all wait for one number, because a CPU device runs at most 32 waiting programs.
        Programs run in order, so all copies are made before any waits."""
        copies = jax.block_until_ready([jnp.negative(source) for source in sources])
        return [
            self._waiting(some) for some in ([[copy] for copy in copies] if apart else [copies])
        ]

    def _waiting(self, copies: list[jax.Array]) -> "Computing":
        pull_id = secrets.randbits(62)
        wholes = [(copy.shape, copy.sharding) for copy in copies]
        lie: dict[Device, dict[int, jax.Array]] = {}
        for place, copy in enumerate(copies):
            for shard in copy.addressable_shards:
                lie.setdefault(shard.device, {})[place] = shard.data
        avals = [
            jax.ShapeDtypeStruct((), np.int32, sharding=jax.sharding.SingleDeviceSharding(device))
            for device in lie
        ]
        numbers = self._inlet.pull(pull_id, avals)
        behind = [
            _behind(parts, number) for parts, number in zip(lie.values(), numbers, strict=True)
        ]
        arrays = [
            jax.make_array_from_single_device_arrays(
                *whole, [parts[place] for parts in behind if place in parts]
            )
            for place, whole in enumerate(wholes)
        ]
        given = [jax.device_put(np.int32(0), device) for device in lie]
        return Computing(arrays, lambda: self._server.await_pull(pull_id, given))


@dataclass(frozen=True)
class Computing:
    """Arrays that become available soon after `finish`."""

    arrays: Sequence[jax.Array]
    finish: Callable[[], None]


@functools.partial(jax.jit, donate_argnums=0)
def _behind(parts: dict[int, jax.Array], number: jax.Array) -> dict[int, jax.Array]:
    """Returns the parts on their devices, available once the number has arrived."""

    def touched(part: jax.Array) -> jax.Array:
        first = (0,) * part.ndim
        return part.at[first].set(part[first] + number.astype(part.dtype))

    return jax.tree.map(touched, parts)


def _finish(computing: Sequence[Computing], seconds: float = 0.0) -> tuple[float, float]:
    """Finishes the arrays one after the other, each after `seconds`. Returns the times of the first
    and of the last."""
    began = finished = 0.0
    for each in computing:
        time.sleep(seconds)
        each.finish()
        jax.block_until_ready(each.arrays)
        finished = time.monotonic()
        began = began or finished
    return began, finished


def link_thread(channel: str) -> KvEndpoint:
    """Starts this process's KV link, server and channel. `channel` selects the backend: "memory"
    (shared memory), "nixl", or the JAX transfer engine."""
    return KvEndpoint(ServiceConfig(port=0), memories=_memories(channel))


def _memories(channel: str) -> Memories:
    match channel:
        case "memory":
            return Memories(SharedMemory())
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
    link = link_thread(channel)
    bare, gate = EngineOptions(transports=TRANSPORTS).start_server(), Gate()
    plain = socket.create_server(("127.0.0.1", 0))
    parent.send((link.end, bare.address(), plain.getsockname()[1]))
    stream, _ = plain.accept()
    payload = memoryview(bytes(64 << 20))
    blocks: list[jax.Array] = []
    case = Case("tp=1", "tp=1")
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
                seconds = command.compute_seconds
                offered = [blocks[number % len(blocks)] for number in range(len(command.offer_ids))]
                computing = gate.computing(offered, apart=seconds > 0)
                if command.at_end:
                    answer = _finish(computing, seconds)
                arrays = [array for each in computing for array in each.arrays]
                for offer_id, array in zip(command.offer_ids, arrays, strict=True):
                    link.channel.offer(offer_id, array, 0, BlockStamp())
                if not command.at_end:
                    answer = _finish(computing, seconds)
            case Release():
                for offer_id in command.offer_ids:
                    link.channel.release(offer_id)
            case Bare():
                cut = jax.block_until_ready(
                    [_bare_pieces(block, command.pieces) for block in blocks]
                )
                count = len(command.pull_ids)
                posted = [piece for number in range(count) for piece in cut[number % len(cut)]]
                computing = gate.computing(posted, apart=False)
                pieces = iter(computing[0].arrays)
                for pull_id in command.pull_ids:
                    bare.await_pull(pull_id, [next(pieces) for _ in command.pieces])
                answer = _finish(computing)
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
