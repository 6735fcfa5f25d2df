"""What executor tests share: two executors on meshes of their own with one channel between them,
commanded by hand."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jdisagg.clock import MonotonicClock
from jdisagg.config import NO_PREFIX, Mode, PrefixConfig
from jdisagg.engine.replica import build_executor
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
from jdisagg.transfer.channel import BlockStamp, Pull, PullTarget
from jdisagg.transfer.in_process import InProcessChannel
from models.checkpoint import load_model
from tests.shapes import (
    CHUNK,
    CONTEXT,
    DECODE,
    DECODE_PAGE,
    LAYER_GROUPS,
    LLAMA,
    PREFILL,
    PREFILL_PAGE,
    instance,
)

Damage = Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]]
PEER = "prefill-0#1"
PAGES = 24  # of a rank
INTO = tuple(range(3, PAGES))[::-1]  # the pages of a decode mesh that blocks go into


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

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


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
    channel: HandChannel | None = None,
    first_device: int = 0,
    *,
    page: int = PREFILL_PAGE,
    dtype: str = "float32",
    few_tokens: int = 0,
    prefix: PrefixConfig = NO_PREFIX,
) -> MeshExecutor:
    shape = Layout.parse(layout)
    devices = jax.devices()[first_device : first_device + shape.devices]
    loaded = load_model(str(LLAMA), shape, devices, dtype=dtype)
    config = instance(layout, page_size=page, pages_per_rank=PAGES)
    if few_tokens:
        config = replace(config, block_bytes=few_tokens * loaded.model.kv_spec.bytes_per_token)
    how = (Mode.DISAGGREGATED, loaded, role, channel or HandChannel(), CONTEXT, LAYER_GROUPS)
    return build_executor(name, config, *how, prefix=prefix)


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
        prefill: str = PREFILL,
        decode: str = DECODE,
        *,
        pages: tuple[int, int] = (PREFILL_PAGE, DECODE_PAGE),
        dtype: str = "float32",
        first_device: int = 4,
        codec: str = "none",
        connect: bool = True,
        few_tokens: int = 0,
    ) -> None:
        self.channel, self.codec = HandChannel(), codec
        self.specs: dict[int, OfferSpec] = {}
        roles = MeshRole(True, False, emit=True), MeshRole(False, True, codec=codec)
        self.prefill, self.decode = (
            executor(
                *("p", layout, role, self.channel, first),
                page=page,
                dtype=dtype,
                few_tokens=few_tokens,
            )
            for layout, role, first, page in zip(
                (prefill, decode), roles, (0, first_device), pages, strict=True
            )
        )
        if connect:
            self.connect()

    def connect(self) -> None:
        self.decode.issue_and_wait(ConnectPeer(0, PEER, self.prefill.card))

    def forget(self) -> None:
        """Offers may have the ids of earlier tests."""
        self.channel.inner = InProcessChannel(MonotonicClock())
        self.channel.damage = None
        self.channel.offers.clear()
        self.specs.clear()

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()

    async def compute(
        self,
        rows: list[tuple[int, int, int, int]],
        key: int,
        *,
        chunk: int = CHUNK,
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
            row = PrefillRow(sequence, rank, offset, ids, past, pages, sample, tuple(offers))
            commands.append(row)
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
        """Pulls an offer to a rank of the decode mesh, into its pages `INTO`, and inserts it."""
        _, _, stamp = self.channel.offers[offer_id]
        at = stamp.start if start is None else start
        asked = self._pull_command(offer_id, rank)
        pull = await self.decode.run(asked)
        assert isinstance(pull, PullResult)
        assert not pull.error
        pages = INTO[: -(-(at + stamp.valid_tokens) // self.decode.limits.page_size)]
        what = (asked.group, asked.block_tokens, stamp.valid_tokens, at, pages)
        command = InsertBlock(3, offer_id, rank, *what, key, PEER, self.codec, asked.groups)
        result = await self.decode.run(command)
        assert isinstance(result, InsertResult)
        return result

    def _pull_command(self, offer_id: int, rank: int) -> PullBlock:
        spec = self.specs[offer_id]
        what = (offer_id, rank, spec.group, spec.block_tokens, 10.0)
        return PullBlock(2, *what, PEER, self.codec, groups=spec.groups)
