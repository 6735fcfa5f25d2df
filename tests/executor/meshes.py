"""What executor tests share: two executors on meshes of their own with one channel between them,
commanded by hand."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import jax
import numpy as np

from jdisagg.clock import MonotonicClock
from jdisagg.config import NO_PREFIX, InstanceConfig, Mode, PrefixConfig
from jdisagg.engine.replica import build_replica
from jdisagg.executor.mesh_executor import MeshExecutor, MeshRole
from jdisagg.layout.axes import Layout
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.messages.step_commands import (
    ConnectPeer,
    InsertBlock,
    InsertResult,
    OfferSpec,
    PrefillChunk,
    PrefillResult,
    PrefillRow,
    PullBlock,
    PullResult,
    SampleSpec,
)
from jdisagg.request import SamplingParams
from jdisagg.scheduler.blocks import padded
from jdisagg.transfer.channel import BlockStamp, Offered, Pull, PullTarget
from jdisagg.transfer.in_process import InProcessChannel
from models.checkpoint import load_model
from tests.end_to_end.clusters import LLAMA

Damage = Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]]
PEER = "prefill-0#1"


class HandChannel:
    """The in-process channel; remembers what was offered, and may damage what is pulled."""

    def __init__(self) -> None:
        self.inner = InProcessChannel(MonotonicClock())
        self.offers: dict[int, tuple[jax.Array, int, BlockStamp]] = {}
        self.connected: list[str] = []
        self.damage: Damage | None = None

    def connect(self, peer: str, card: MeshCard) -> None:
        self.connected.append(peer)

    def disconnect(self, peer: str) -> None:
        self.connected.remove(peer)

    def offer(
        self,
        offer_id: int,
        block: jax.Array,
        rank: int,
        stamp: BlockStamp = BlockStamp(),  # noqa: B008
    ) -> None:
        self.offers[offer_id] = (block, rank, stamp)
        self.inner.offer(offer_id, block, rank, stamp)

    def pull(self, offer_id: int, target: PullTarget, deadline_seconds: float) -> Pull:
        pull = self.inner.pull(offer_id, target, deadline_seconds)
        return _Damaged(pull, self.damage) if self.damage else pull  # type: ignore[return-value]

    def release(self, offer_id: int) -> None:
        self.inner.release(offer_id)

    def revoke(self, offer_id: int, reason: str) -> None:
        self.inner.revoke(offer_id, reason)

    def offered(self) -> Offered:
        return self.inner.offered()

    def bytes_per_pair(self) -> dict[tuple[int, int], int]:
        return self.inner.bytes_per_pair()


class _Damaged:
    """A pull whose arrays are not what was sent."""

    def __init__(self, pull: Pull, damage: Damage) -> None:
        self._pull, self._damage = pull, damage

    def arrays(self) -> tuple[jax.Array, ...]:
        before = self._pull.arrays()
        after = self._damage(before)
        assert any(_differ(a, b) for a, b in zip(before, after, strict=True)), (
            "the fault took no effect"
        )
        return after

    def __getattr__(self, name: str) -> object:
        return getattr(self._pull, name)


def _differ(before: jax.Array, after: jax.Array) -> bool:
    """On some device, replicas included."""
    pairs = zip(before.addressable_shards, after.addressable_shards, strict=True)
    return any(np.asarray(a.data).tobytes() != np.asarray(b.data).tobytes() for a, b in pairs)


def executor(
    name: str,
    layout: str,
    role: MeshRole,
    channel: HandChannel,
    first_device: int,
    *,
    page: int,
    dtype: str,
    few_tokens: int = 0,
    prefix: PrefixConfig = NO_PREFIX,
) -> MeshExecutor:
    shape = Layout.parse(layout)
    loaded = load_model(
        str(LLAMA), shape, jax.devices()[first_device : first_device + shape.devices], dtype=dtype
    )
    config = InstanceConfig(
        layout=shape,
        page_size=page,
        pages_per_rank=24,
        slots_per_rank=2,
        chunk_tokens=128,
        layer_groups=2,
    )
    if few_tokens:
        config = replace(config, block_bytes=few_tokens * loaded.model.kv_spec.bytes_per_token)
    mode = Mode.DISAGGREGATED
    made = build_replica(name, config, mode, loaded, role, channel, 256, 2, prefix=prefix)
    return made.executor


Cuts = Callable[[int, int], Iterable[tuple[int, int, int]]]


def doubling(tokens: int, granule: int) -> Iterator[tuple[int, int, int]]:
    """Cuts a row into blocks of more lengths than `split_blocks`: the executor takes any."""
    offset, rest = 0, -(-tokens // granule)
    while rest:
        size = granule << (rest.bit_length() - 1)
        yield offset, size, min(size, tokens - offset)
        offset, rest = offset + size, rest - size // granule


class Pair:
    """A prefill executor and a decode executor that knows it. `first_device`: where the decode mesh
    begins. Two layer groups; blocks of fewer than twice `few_tokens` carry both."""

    def __init__(
        self,
        prefill: str,
        decode: str,
        *,
        pages: tuple[int, int] = (16, 8),
        dtype: str = "float32",
        first_device: int = 4,
        codec: str = "none",
        connect: bool = True,
        few_tokens: int = 0,
    ) -> None:
        self.channel = HandChannel()
        roles, how = (
            (MeshRole(True, False, emit=True), MeshRole(False, True, codec=codec)),
            {"dtype": dtype, "few_tokens": few_tokens},
        )
        self.prefill = executor("p", prefill, roles[0], self.channel, 0, page=pages[0], **how)  # type: ignore[arg-type]
        self.decode = executor(
            "d", decode, roles[1], self.channel, first_device, page=pages[1], **how
        )  # type: ignore[arg-type]
        self.specs: dict[int, OfferSpec] = {}
        self.codec = codec
        if connect:
            self.connect()

    def connect(self) -> None:
        self.decode.issue_and_wait(ConnectPeer(0, PEER, self.prefill.card))

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()

    async def compute(
        self,
        rows: list[tuple[int, int, int, int]],
        key: int,
        *,
        chunk: int = 128,
        past: int = 0,
        cut: Cuts = doubling,
    ) -> PrefillResult:
        """Prefills rows (rank, offset, tokens, first offer id) that end at position past + tokens;
        offers all of them."""
        limits = self.prefill.limits
        commands: list[PrefillRow] = []
        for sequence, (rank, offset, tokens, offer_id) in enumerate(rows):
            cuts = [(at, size) for at, size, _ in cut(tokens, limits.granule_tokens)]
            bands = [(band, at, size) for at, size in cuts for band in limits.bands(size)]
            offers = [
                OfferSpec(offer_id + i, band.start, offset + at, size, len(band))
                for i, (band, at, size) in enumerate(bands)
            ]
            self.specs.update({offer.offer_id: offer for offer in offers})
            ids = tuple((7 * sequence + 3 * t + offer_id) % 1000 + 5 for t in range(tokens))
            first_page = 8 * sequence
            pages = tuple(range(first_page, first_page + -(-(past + tokens) // limits.page_size)))
            sample = (SampleSpec(0, SamplingParams(temperature=0.0)),) if tokens % 2 else ()
            commands.append(
                PrefillRow(sequence, rank, offset, ids, past, pages, sample, tuple(offers))
            )
            assert padded(tokens, 16) + offset <= chunk
        result = await self.prefill.run(PrefillChunk(1, chunk, tuple(commands), key))
        assert isinstance(result, PrefillResult)
        return result

    def pulled(self, offer_id: int) -> tuple[jax.Array, ...]:
        """What pulling an offer to rank 0 of the decode mesh gives."""
        pull = self.channel.inner.pull(
            offer_id, self.decode.pull_target(self._pull_command(offer_id, 0)), 10.0
        )
        while not pull.is_ready():
            time.sleep(0.001)
        return pull.arrays()

    async def move(
        self, offer_id: int, rank: int, key: int, *, start: int | None = None
    ) -> InsertResult:
        """Pulls an offer to a rank of the decode mesh, into pages 3.. of it (in descending order),
        and inserts it."""
        _, _, stamp = self.channel.offers[offer_id]
        at = stamp.start if start is None else start
        asked = self._pull_command(offer_id, rank)
        pull = await self.decode.run(asked)
        assert isinstance(pull, PullResult)
        assert not pull.error
        pages = tuple(range(3, 24))[::-1][
            : -(-(at + stamp.valid_tokens) // self.decode.limits.page_size)
        ]
        what = (asked.group, asked.block_tokens, stamp.valid_tokens, at, pages)
        command = InsertBlock(3, offer_id, rank, *what, key, PEER, self.codec, asked.groups)
        result = await self.decode.run(command)
        assert isinstance(result, InsertResult)
        return result

    def _pull_command(self, offer_id: int, rank: int) -> PullBlock:
        spec = self.specs[offer_id]
        return PullBlock(
            2,
            offer_id,
            rank,
            spec.group,
            spec.block_tokens,
            10.0,
            PEER,
            self.codec,
            groups=spec.groups,
        )
