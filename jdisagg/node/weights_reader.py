"""Reads weights that other processes offer, with the interface of a checkpoint's tensors.

The bytes are transferred in blocks, each of which has pieces of one or several tensors. The caller
declares its reads in advance (`expect`), so that blocks for later reads are transferred while
earlier ones are converted. Each block is verified with the checksum that its source computed before
the transfer."""

import asyncio
import contextlib
import hashlib
import itertools
import socket
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.config import ServiceConfig
from jdisagg.dispatch.ids import random_id
from jdisagg.errors import (
    ConfigError,
    HandoffError,
    InvalidRequestError,
    JdisaggError,
    UnavailableError,
)
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.layout.reshard_plan import Box
from jdisagg.layout.weight_reads import ReadPiece, Source, plan_reads
from jdisagg.messages.weights import OFFER_PREFIX, OfferCard, OfferedPart, OfferPort, PreparedBlock
from jdisagg.node.kv_endpoint import KvEndpoint
from jdisagg.ops.checksum import byte_sum
from jdisagg.ops.device_layout import aligned_empty
from jdisagg.service.internal import rpc
from jdisagg.service.internal.connection import Connection
from jdisagg.service.server import cluster_credentials
from jdisagg.settings.address import parse_host_port
from jdisagg.transfer.channel import Pull, PullTarget
from jdisagg.transfer.offered_weights import stepped, unreadable, whole_box

BLOCK_BYTES = (8 << 20) - (4 << 10)  # fits, with its header, into a power of two
AHEAD_BYTES = 32 << 20  # bytes of blocks that may be requested and not yet converted
PULL_SECONDS = 30.0  # time limit of the transfer of a block
CHECK_SECONDS = 1.0  # interval between checks that the source is alive
DESCRIBE_SECONDS = 300.0  # the source hashes its arrays within this time
PULL_TRIES = 3  # a transfer backend that fails is replaced by another one
POLL_SECONDS = 0.002
RELEASE_SECONDS = 0.01  # blocks read within this time are released with one message


@dataclass(slots=True)
class _Origin:
    name: str
    connection: Connection
    port: OfferPort
    card: OfferCard
    peer: str
    read: list[int] = field(default_factory=list)  # blocks that the process may free


@dataclass(slots=True)
class _Block:
    pieces: tuple[ReadPiece, ...]
    left: int
    coming: "Future[np.ndarray] | None" = None

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


@dataclass(slots=True)
class _Expected:
    blocks: list[_Block] = field(default_factory=list)
    reads: dict[tuple[str, Box], deque[int]] = field(default_factory=dict)
    places: list[list[tuple[int, int, ReadPiece]]] = field(default_factory=list)
    next_block: int = 0
    ahead_bytes: int = 0


class RemoteWeights:
    """Named arrays that other processes offer, with the methods of a checkpoint's tensors. One
    thread may use it, until `close`.

    Args:
        name: Names of the offers of all processes, separated by commas.
        check: Function that is called while the reader waits for bytes. It raises an error to stop
            the reading.

    Attributes:
        parameters: Whether the arrays are a worker's parameters in their served form (such as
            quantized), and not the tensors of a checkpoint.

    Raises:
        InvalidRequestError: A name is invalid, an offer is unknown, or the offers do not match.
        UnavailableError: An offering process does not answer.
    """

    def __init__(
        self, name: str, service: ServiceConfig, check: Callable[[], None] | None = None
    ) -> None:
        self.name, self.bytes_moved, self._check = name, 0, check
        self._parts = [part.removeprefix(OFFER_PREFIX) for part in name.split(",")]
        addresses = [part.rpartition("/")[0] for part in self._parts]
        host = _own_address(name, addresses[0])
        self._credentials = cluster_credentials(service)
        own = service if service.advertise_host else service.at(host)
        self._endpoint = KvEndpoint(replace(own, port=0, http_port=None))
        self._expected = _Expected()
        self._origins: list[_Origin] = []
        try:
            for part, address in zip(self._parts, addresses, strict=True):
                opening = self._endpoint.start(self._open(OFFER_PREFIX + part, address))
                self._origins.append(opening.result())
            self._describe()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for block in self._expected.blocks:
            if block.coming is not None:
                block.coming.cancel()
        self._expected = _Expected()
        with contextlib.suppress(Exception):
            self._endpoint.start(self._disconnect()).result()
        self._endpoint.close()

    def content(self, *, again: bool = False) -> str:
        """Returns the hash of the arrays' values, as the sources reported it when this object was
        constructed. With `again`, the sources compute the hash of numpy arrays again."""
        cards = [
            self._endpoint.start(origin.port.describe(origin.name)).result()
            if again
            else origin.card
            for origin in self._origins
        ]
        found = [card.content for card in cards]
        if len(found) == 1:
            return found[0]
        return hashlib.blake2b("\n".join(found).encode(), digest_size=16).hexdigest()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def kinds(self, *, but: tuple[str, ...] = ()) -> set[str]:
        return {dtype for name, dtype in self.dtypes.items() if not name.endswith(but)}

    def unreadable(self) -> list[str]:
        return unreadable(self.dtypes)

    @property
    def total_bytes(self) -> int:
        return sum(
            int(np.prod(shape)) * jnp.dtype(self.dtypes[name]).itemsize
            for name, shape in self._shapes.items()
        )

    def expect(self, reads: Sequence[tuple[str, Box]]) -> None:
        """Declares the following calls of `read`, in order. Their bytes are then transferred in
        advance. Raises LayoutError if no source holds a part of a read."""
        planned = plan_reads(
            [self._held[name] for name in self._numbers],
            [jnp.dtype(self.dtypes[name]).itemsize for name in self._numbers],
            [(self._numbers[name], box) for name, box in reads],
            BLOCK_BYTES,
        )
        expected = _Expected([_Block(pieces, len(pieces)) for pieces in planned])
        expected.places = [[] for _ in reads]
        for number, read in enumerate(reads):
            expected.reads.setdefault(read, deque()).append(number)
        for number, pieces in enumerate(planned):
            offset = 0
            for piece in pieces:
                expected.places[piece.read].append((number, offset, piece))
                offset += piece.nbytes
        self._expected = expected

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a slice of a tensor. The result may be a read-only view of received memory. A
        slice that was not declared with `expect` is transferred at once. Raises UnavailableError if
        a source does not answer, or the transfer failed repeatedly. Raises InvalidRequestError if
        the bytes differ from their checksum, or the offer has ended."""
        box = whole_box(index, self._shapes[name])
        waiting = self._expected.reads.get((name, box))
        if not waiting:
            before, self._expected = self._expected, _Expected()
            try:
                self.expect([(name, box)])
                return stepped(self._taken(0, name, box), index)
            finally:
                self._expected = before
        return stepped(self._taken(waiting.popleft(), name, box), index)

    def _taken(self, number: int, name: str, box: Box) -> np.ndarray:
        dtype, places = jnp.dtype(self.dtypes[name]), self._expected.places[number]
        if len(places) == 1:
            ((place, offset, piece),) = places
            return self._part(place, offset, piece, dtype)
        values = aligned_empty([stop - start for start, stop in box], dtype)
        for place, offset, piece in places:
            bounds = tuple(slice(*bound) for bound in piece.place)
            values[bounds] = self._part(place, offset, piece, dtype)
        return values

    def _part(self, place: int, offset: int, piece: ReadPiece, dtype: np.dtype) -> np.ndarray:
        self._request_until(place)
        expected, block = self._expected, self._expected.blocks[place]
        assert block.coming is not None, "each piece is read once"
        arrived = self._result(block.coming)[offset : offset + piece.nbytes]
        block.left -= 1
        if not block.left:
            block.coming = None
            expected.ahead_bytes -= block.nbytes
        view = arrived.view(dtype).reshape([end - first for first, end in piece.box])
        view.flags.writeable = False
        return view

    def _result(self, coming: "Future[np.ndarray]") -> np.ndarray:
        while not coming.done():
            if self._check is not None:
                self._check()
            wait([coming], CHECK_SECONDS)
        try:
            return coming.result()
        except CancelledError:
            raise UnavailableError("weights: the reading was ended; update again") from None

    def _request_until(self, place: int) -> None:
        """Does nothing if `place` is already requested and less than half of `AHEAD_BYTES` is free,
        so that one message requests several blocks."""
        expected = self._expected
        if expected.next_block > place and expected.ahead_bytes > AHEAD_BYTES // 2:
            return
        wanted: list[_Block] = []
        while expected.next_block < len(expected.blocks) and (
            expected.next_block <= place or expected.ahead_bytes < AHEAD_BYTES
        ):
            wanted.append(expected.blocks[expected.next_block])
            expected.ahead_bytes += wanted[-1].nbytes
            expected.next_block += 1
        for process, some in itertools.groupby(wanted, lambda one: one.pieces[0].source[0]):
            blocks, origin = list(some), self._origins[process]
            prepared = self._endpoint.start(self._prepare(origin, [one.pieces for one in blocks]))
            for number, block in enumerate(blocks):
                fetching = self._fetch(origin, block.pieces, prepared, number)
                block.coming = self._endpoint.start(fetching)

    # The coroutines below run on the endpoint's thread.

    async def _open(self, name: str, address: str) -> _Origin:
        connection = Connection(address, self._credentials)
        port = rpc.client(
            OfferPort,
            connection,
            call_seconds=CHECK_SECONDS * 3,
            seconds={"describe": DESCRIBE_SECONDS},
        )
        try:
            card = await port.describe(name)
        except BaseException:
            await connection.aclose()
            raise
        peer = f"{name}#{random_id():x}"
        mesh = MeshCard((1, 1, 1), (0,), (0,), (card.end,), card.transports)
        self._endpoint.channel.connect(peer, mesh)
        return _Origin(name, connection, port, card, peer)

    async def _disconnect(self) -> None:
        for origin in self._origins:
            await _send_released(origin)
            self._endpoint.channel.disconnect(origin.peer)
            await origin.connection.aclose()

    async def _prepare(
        self, origin: _Origin, blocks: Sequence[tuple[ReadPiece, ...]]
    ) -> tuple[PreparedBlock, ...]:
        parts = tuple(
            tuple(OfferedPart(one.tensor, one.source[1], one.box) for one in pieces)
            for pieces in blocks
        )
        return await origin.port.prepare(origin.name, parts, PULL_SECONDS)

    async def _fetch(
        self,
        origin: _Origin,
        pieces: tuple[ReadPiece, ...],
        requested: "Future[tuple[PreparedBlock, ...]]",
        number: int,
    ) -> np.ndarray:
        prepared = (await asyncio.shield(asyncio.wrap_future(requested)))[number]
        for attempt in range(PULL_TRIES):
            try:
                arrived = await self._pulled(origin, prepared)
                break
            except HandoffError as error:
                if attempt + 1 == PULL_TRIES:
                    raise UnavailableError(f"weights {self.name!r}: {error.message}") from error
                (prepared,) = await self._prepare(origin, [pieces])
        size = sum(piece.nbytes for piece in pieces)
        checksum = await asyncio.to_thread(byte_sum, arrived)
        if arrived.nbytes != size or checksum != prepared.checksum:
            raise InvalidRequestError(
                f"weights {self.name!r}: the checksum of a block from {origin.card.end.control}"
                " differs from its source's: bytes have changed on the way; update again"
            )
        self.bytes_moved += arrived.nbytes
        return arrived

    async def _pulled(self, origin: _Origin, prepared: PreparedBlock) -> np.ndarray:
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shape = jax.ShapeDtypeStruct((1, 1, 1, 1, prepared.size), jnp.uint8, sharding=here)
        target = PullTarget(shape, 0, origin.peer)  # type: ignore[arg-type]
        pull = self._endpoint.channel.pull(prepared.offer_id, target, PULL_SECONDS)
        try:
            await self._arrival(origin, pull)
            (array,) = pull.arrays()
            return np.asarray(array).reshape(-1)
        finally:
            if not pull.is_ready():
                pull.cancel()
            self._release(origin, prepared.offer_id)

    def _release(self, origin: _Origin, offer_id: int) -> None:
        async def release() -> None:
            await asyncio.sleep(RELEASE_SECONDS)
            await _send_released(origin)

        origin.read.append(offer_id)
        if len(origin.read) == 1:
            self._endpoint.start(release())

    async def _arrival(self, origin: _Origin, pull: Pull) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + CHECK_SECONDS
        while not pull.is_ready():
            await asyncio.sleep(POLL_SECONDS)
            if loop.time() > due:
                await origin.port.check(origin.name)
                due = loop.time() + CHECK_SECONDS

    def _describe(self) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._held: dict[str, dict[Source, Box]] = {}
        first = self._origins[0].card
        self.parameters = first.parameters
        for process, origin in enumerate(self._origins):
            for tensor in origin.card.tensors:
                known = self._shapes.setdefault(tensor.name, tensor.shape)
                kind = self.dtypes.setdefault(tensor.name, tensor.dtype)
                if (known, kind) != (tensor.shape, tensor.dtype):
                    raise InvalidRequestError(
                        f"weights {self.name!r}: its processes offer {tensor.name} as {kind}"
                        f" {known} and as {tensor.dtype} {tensor.shape}; offer the same in all"
                    )
                held = self._held.setdefault(tensor.name, {})
                held |= {(process, device): box for device, box in tensor.boxes}
            if [one.name for one in origin.card.tensors] != [one.name for one in first.tensors]:
                raise InvalidRequestError(
                    f"weights {self.name!r}: its processes offer arrays of other names, or in"
                    " another order; offer the same tree in all"
                )
        self._numbers = {tensor.name: number for number, tensor in enumerate(first.tensors)}


async def _send_released(origin: _Origin) -> None:
    read, origin.read = tuple(origin.read), []
    if read:
        with contextlib.suppress(JdisaggError):
            await origin.port.release(read)


def _own_address(name: str, address: str) -> str:
    try:
        host, port = parse_host_port(address, "offer")
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except (OSError, ConfigError) as error:
        raise InvalidRequestError(
            f"weights {name!r}: {address!r} must be the host:port of an offer: {error}; use the"
            " name that the offer has"
        ) from error
