"""Reads and writes blocks of KV in a mesh's pages, and pulls blocks from other meshes. A block is
the KV of some tokens and layers of one sequence (`transfer/__init__.py`).

`BlockPrograms` extracts, inserts and copies blocks of one page pool. Each operation is one program
for the whole mesh (`shard_map`, explicit shardings, pages donated), so that no per-device
executable is built and no shard is donated alone. Token ranges are split into power-of-two lengths,
so that few shapes and programs are needed. Only the dispatch thread uses this module."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdisagg.errors import HandoffError
from jdisagg.executor.block_sums import STAMP_WORDS, found_in, found_spec, local_sum, rank_stamps
from jdisagg.executor.insert_program import BlockForm, Places, write_and_read, write_whole
from jdisagg.executor.page_pool import LayerPages, PagePool, PageView, Pools
from jdisagg.executor.programs import BLOCK_SPEC, RANK, Programs
from jdisagg.executor.results import BlockReading, PullReading, start_reading
from jdisagg.layout.kv_spec import KvKind, KVLayer, KVSpec
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.layout.platforms import traits_of
from jdisagg.layout.reshard_plan import head_granule
from jdisagg.messages.step_commands import (
    HOST,
    CopyPages,
    DropBlocks,
    ExtractBlock,
    InsertBlock,
    PullBlock,
)
from jdisagg.ops.kv_pages import copy_pages, gather_block
from jdisagg.ops.kv_rows import block_of
from jdisagg.scheduler.blocks import layer_groups
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.transfer.channel import BlockStamp, Channel, Pull, PullTarget
from jdisagg.transfer.codec import Codec, codec
from jdisagg.transfer.host_store import HostStore
from jdisagg.transfer.pieces import NO_CODEC, warm_pieces

COPIES_PER_CALL = 8


class BlockPrograms:
    def __init__(
        self,
        programs: Programs,
        pool: PagePool | PageView,
        groups: tuple[range, ...],
        name: str = "kv",
    ) -> None:
        self._programs, self._pool, self._groups = programs, pool, groups
        self._name = name
        self._ranks = programs.mesh.shape["dp"]

    @property
    def nowhere(self) -> int:
        """A page number that no page has. Writes to it have no effect."""
        return self._pool.rank_rows

    def insert(self, command: InsertBlock, arrays: tuple[jax.Array, ...]) -> jax.Array:
        """Returns the checksum of the values read back, as an array in the form of
        `block_sums.found_in`."""
        layers, how = self.layers(command.group, command.groups), codec(command.codec)
        kinds = self._kinds(layers)
        held = self._pool.layers[layers.start : layers.stop]
        stamp = self._stamp(layers, command.checksum_key, command.start, command.valid_tokens)
        if how.lossy:
            stamp = stamp.of_offer(command.offer_id)
        inputs = (held, arrays, self._place(command, stamp))
        key = (
            "insert",
            self._name,
            kinds,
            command.block_tokens,
            command.codec,
            len(arrays),
            arrays[0].shape,
        )
        program = self._programs.get(key, lambda: self._build_insert(how, inputs, layers))
        pages, found = program(*inputs)
        self._pool.put(layers.start, pages)
        return found

    def layers(self, group: int, groups: int) -> range:
        return range(self._groups[group].start, self._groups[group + groups - 1].stop)

    def _kinds(self, layers: range) -> tuple[KVLayer, ...]:
        return self._pool.spec.layers[layers.start : layers.stop]

    def _build_insert(self, how: Codec, inputs: tuple[Any, ...], layers: range) -> Any:
        programs, arrays, spec = self._programs, inputs[1], self._pool.spec
        kinds = self._kinds(layers)
        # Values are gathered over mesh axis kv once, outside of the loop over tokens.
        gathers = any(spec.is_cut(part) for layer in kinds for part in layer.components)
        whole = traits_of(programs.platform).inserts_whole or gathers
        read = partial(gather_block, platform=programs.platform)
        write = partial(write_whole, gather=read) if whole else write_and_read

        def body(
            pages: list[LayerPages], arrays: tuple[jax.Array, ...], words: jax.Array
        ) -> tuple[list[LayerPages], jax.Array]:
            form = BlockForm(spec, kinds, how)
            pages, sum_2, intact = write(pages, arrays, self._places(words), form)
            return pages, found_in(programs, sum_2, intact)

        page_specs = self._pool.specs(layers)
        in_specs = (page_specs, tuple(BLOCK_SPEC for _ in arrays), RANK)
        return self._programs.compile(
            body, inputs, in_specs, (page_specs, found_spec(programs)), donate=(0,)
        )

    def extract(self, command: ExtractBlock) -> tuple[jax.Array, jax.Array, BlockStamp]:
        """Sets padding tokens to zero, so that no other sequence's KV leaves the mesh. Returns the
        block, its checksum (see `insert`) and its stamp."""
        layers = self.layers(command.group, command.groups)
        stamp = self._stamp(layers, command.checksum_key, command.start, command.valid_tokens)
        held = self._pool.layers[layers.start : layers.stop]
        inputs = (held, self._place(command, stamp))
        tokens = command.block_tokens
        program = self._programs.get(
            ("extract", self._name, self._kinds(layers), tokens),
            lambda: self._build_extract(inputs, tokens, layers),
        )
        block, found = program(*inputs)
        return block, found, stamp

    def _build_extract(self, inputs: tuple[Any, ...], tokens: int, layers: range) -> Any:
        programs, kinds, spec = self._programs, self._kinds(layers), self._pool.spec

        def body(pages: list[LayerPages], words: jax.Array) -> tuple[jax.Array, jax.Array]:
            places, token_T = self._places(words), jnp.arange(tokens, dtype=jnp.int32)
            valid_T = token_T < places.valid
            page_T, slot_T = places.some(token_T, valid_T)
            read_CKTH = block_of(
                kinds,
                [
                    [gather_block(part, page_T, slot_T, programs.platform) for part in layer]
                    for layer in pages
                ],
                spec,
            )
            read_CKTH = jnp.where(
                valid_T[None, None, :, None], read_CKTH, jnp.zeros((), read_CKTH.dtype)
            )
            return read_CKTH[None], found_in(
                programs, local_sum(read_CKTH, places.stamp_5, token_T, valid_T), jnp.bool_(True)
            )

        return self._programs.compile(
            body, inputs, (self._pool.specs(layers), RANK), (BLOCK_SPEC, found_spec(programs))
        )

    def _stamp(self, layers: range, key: int, start: int, valid_tokens: int) -> BlockStamp:
        return BlockStamp(key, self._pool.spec.first_row(layers.start), start, valid_tokens)

    def _place(
        self, command: InsertBlock | ExtractBlock, stamp: BlockStamp
    ) -> jax.Array | np.ndarray:
        first, last = (
            at // self._pool.page_size
            for at in (command.start, command.start + command.valid_tokens - 1)
        )
        pages = command.pages[first : last + 1] if command.valid_tokens else ()
        # Without this check, page 0, which belongs to another sequence, would be written, and the
        # checksum would still match.
        assert command.valid_tokens <= command.block_tokens and len(pages) == (
            last - first + 1 if command.valid_tokens else 0
        ), command
        assert len(set(pages)) == len(pages), (
            f"the pages of a block must differ, and they are {pages}"
        )
        words = np.zeros(
            (self._ranks, STAMP_WORDS + 2 + (command.block_tokens - 1) // self._pool.page_size),
            np.uint32,
        )
        words[:, :STAMP_WORDS] = rank_stamps(self._ranks, command.rank, stamp)
        words[command.rank, STAMP_WORDS : STAMP_WORDS + len(pages)] = pages
        # The program takes the words as a host array, because a separate transfer to the device
        # would add half of the call's time.
        return self._programs.put(words) if self._programs.spans_processes else words

    def _places(self, words: jax.Array) -> Places:
        return Places.of(words[0], self._pool.page_size, self._pool.rank_rows)

    def copy(self, copies: tuple[tuple[int, int, int], ...]) -> None:
        """Each copy is (rank, source page, destination page). One program call copies up to
        COPIES_PER_CALL pages."""
        for first in range(0, len(copies), COPIES_PER_CALL):
            pairs = np.full((self._ranks, 2, COPIES_PER_CALL), self._pool.rank_rows, np.int32)
            pairs[:, 0] = 0
            for column, (rank, source, destination) in enumerate(
                copies[first : first + COPIES_PER_CALL]
            ):
                pairs[rank, :, column] = source, destination
            on_mesh = self._programs.argument(pairs)
            program = self._programs.get(
                ("copy", self._name), lambda on_mesh=on_mesh: self._build_copy(on_mesh)
            )
            self._pool.put(0, program(self._pool.layers, on_mesh))

    def _build_copy(self, pairs: jax.Array) -> Any:
        def body(layers: list[LayerPages], pairs: jax.Array) -> list[LayerPages]:
            return [
                tuple(copy_pages(part, pairs[0, 0], pairs[0, 1]) for part in layer)
                for layer in layers
            ]

        specs = self._pool.specs()
        return self._programs.compile(
            body, (self._pool.layers, pairs), (specs, RANK), specs, donate=(0,)
        )


class PullTargets:
    def __init__(self, programs: Programs, spec: KVSpec) -> None:
        self._programs, self.mesh = programs, programs.mesh
        self.spec = spec
        self._granules: dict[str, int] = {}
        self._zeros: dict[tuple[int, int, int], jax.Array] = {}
        self._leaves: dict[tuple[int, int, int, str], tuple[jax.Array, ...]] = {}

    @property
    def local_heads(self) -> int:
        return self.spec.row_heads // self.mesh.shape["kv"]

    def connect(self, peer: str, card: MeshCard) -> None:
        """A pull that names no mesh uses the mesh that is registered as "". Warm-up compiles
        programs for this mesh, too."""
        self._granules[peer] = head_granule(
            self.spec.row_heads, card.head_shards, self.mesh.shape["kv"]
        )

    def disconnect(self, peer: str) -> None:
        self._granules.pop(peer, None)

    def granules(self) -> set[int]:
        """Returns the numbers of KV heads per transferred piece that connected meshes use. If no
        mesh is connected, returns all possible numbers."""
        heads = self.spec.row_heads
        shards = (count for count in range(1, heads + 1) if heads % count == 0)
        return set(self._granules.values()) or {
            head_granule(heads, count, self.mesh.shape["kv"]) for count in shards
        }

    def target(self, block: PullBlock, layers: range, granule: int = 0) -> PullTarget:
        """Returns the destination of a pull.

        Raises:
            HandoffError: The sending mesh is not connected.
        """
        spec, how = self.spec, codec(block.codec)
        granule = granule or self._granule(block.peer)
        rows, width = spec.rows(layers), spec.row_width
        key = (rows, block.block_tokens, granule)
        if key not in self._zeros:
            self._zeros[key] = self._resident(
                rows, granule, block.block_tokens, width, jnp.dtype(spec.row_dtype)
            )
        zeros, leaves = self._zeros[key], ()
        if how.lossy:
            if (*key, block.codec) not in self._leaves:
                shape = (1, rows, granule, block.block_tokens, width)
                self._leaves[*key, block.codec] = tuple(
                    self._resident(c, g, t, x, leaf.dtype)
                    for leaf in how.leaves(jax.ShapeDtypeStruct(shape, zeros.dtype))
                    for _, c, g, t, x in [leaf.shape]
                )
            leaves = self._leaves[*key, block.codec]
        return PullTarget(
            zeros, block.rank, block.peer, codec=block.codec if how.lossy else "none", leaves=leaves
        )

    def _resident(
        self, components: int, granule: int, tokens: int, width: int, dtype: jnp.dtype
    ) -> jax.Array:
        ranks, shards = self.mesh.shape["dp"], self.mesh.shape["kv"]
        shape = ranks, components, granule * shards, tokens, width
        return self._programs.zeros(shape, dtype, BLOCK_SPEC)

    def _granule(self, peer: str) -> int:
        known = set(self._granules.values())
        if not peer and len(known) == 1:
            return known.pop()
        if peer not in self._granules:
            raise HandoffError(
                f"nothing can be pulled from {peer!r}: it is not connected; hello first"
            )
        return self._granules[peer]


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """`sent` is True if other meshes receive blocks of this kind."""

    programs: BlockPrograms
    targets: PullTargets
    sent: bool


class MeshBlocks:
    def __init__(
        self,
        stages: Sequence[tuple[Programs, Pools]],
        stage_of: Sequence[int],
        limits: MeshLimits,
        groups: tuple[range, ...],
        channel: Channel,
        host: HostStore,
    ) -> None:
        self._limits, self._stage_of = limits, stage_of
        self._channel, self._host = channel, host
        self.granule = 0
        self._pulls: dict[int, Pull] = {}
        self._stages = [self._kinds_of(*stage, groups) for stage in stages]

    def _kinds_of(
        self, programs: Programs, pools: Pools, groups: tuple[range, ...]
    ) -> dict[KvKind, _Kind]:
        limits = self._limits
        spec, layers = limits.kv_spec, len(limits.kv_spec.layers)
        apart = limits.windows_apart
        windowed = spec.windowed if apart else limits.nothing
        window_groups = (
            layer_groups(windowed.positioned, layers, limits.window_groups) if apart else ()
        )
        return {
            KvKind.POSITIONS: _Kind(
                BlockPrograms(programs, pools.pages.view(limits.sent), groups),
                PullTargets(programs, limits.sent),
                True,
            ),
            # The states of all layers form one group.
            KvKind.STATE: _Kind(
                BlockPrograms(programs, pools.states, (range(layers),), "state"),
                PullTargets(programs, spec.state),
                spec.has_state,
            ),
            KvKind.WINDOW: _Kind(
                BlockPrograms(programs, pools.rings, window_groups, "window"),
                PullTargets(programs, windowed),
                apart,
            ),
        }

    def connect(self, peer: str, card: MeshCard) -> None:
        for kind in self._every():
            if kind.sent:
                kind.targets.connect(peer, card)

    def disconnect(self, peer: str) -> None:
        for kind in self._every():
            kind.targets.disconnect(peer)

    def _every(self) -> Iterator[_Kind]:
        for kinds in self._stages:
            yield from kinds.values()

    def _kind(self, kind: KvKind, group: int) -> _Kind:
        """Only instances with one pipeline stage have recurrent states and KV of windows that is
        transferred separately."""
        stage = self._stage_of[group] if kind is KvKind.POSITIONS else 0
        return self._stages[stage][kind]

    def mesh(self, kind: KvKind, group: int) -> jax.sharding.Mesh:
        return self._kind(kind, group).targets.mesh

    def target(self, command: PullBlock) -> PullTarget:
        """The source is another mesh, or this mesh's host memory, which stores each device's part
        of a block as one piece."""
        kind = self._kind(command.kind, command.group)
        layers = kind.programs.layers(command.group, command.groups)
        granule = kind.targets.local_heads if command.peer == HOST else self.granule
        return kind.targets.target(command, layers, granule)

    def pull(self, command: PullBlock) -> PullReading:
        source = self._host if command.peer == HOST else self._channel
        pull = source.pull(command.offer_id, self.target(command), command.deadline_seconds)
        self._pulls[command.offer_id] = pull
        return PullReading(command.step, command.offer_id, pull)

    def insert(self, command: InsertBlock) -> BlockReading:
        arrays = self._pulls.pop(command.offer_id).arrays()
        found = self._kind(command.kind, command.group).programs.insert(command, arrays)
        start_reading((found,))
        return BlockReading(command.step, command.offer_id, found)

    def drop(self, command: DropBlocks) -> None:
        """Drops pulled blocks that are no longer needed, and cancels their pulls if they are in
        progress."""
        for offer_id in command.offer_ids:
            if pull := self._pulls.pop(offer_id, None):
                pull.cancel()

    def extract(self, command: ExtractBlock) -> BlockReading:
        """Extracts a block and offers it to other meshes, or copies it to host memory."""
        programs = self._kind(command.kind, command.group).programs
        block, found, stamp = programs.extract(command)
        copy = None
        if command.to_host:
            copy = self._host.put(command.offer_id, block, command.rank)
        else:
            self._channel.offer(
                command.offer_id, block, command.rank, stamp.of_offer(command.offer_id)
            )
        start_reading((found,))
        return BlockReading(
            command.step, command.offer_id, found, True, in_order=not command.to_host, copy=copy
        )

    def copy(self, command: CopyPages) -> None:
        for kinds in self._stages:
            kinds[KvKind.POSITIONS].programs.copy(command.copies)
        first = self._stages[0]
        if self._limits.kv_spec.has_state:
            first[KvKind.STATE].programs.copy(command.states)
        size = self._limits.ring_pages
        rings = tuple(
            (rank, source * size + page, destination * size + page)
            for rank, source, destination in command.states
            for page in range(size)
        )
        first[KvKind.WINDOW].programs.copy(rings)

    # The methods below compile programs by running them on blocks without a valid token.

    def warm_copy(self) -> None:
        kinds = [KvKind.POSITIONS]
        kinds += [KvKind.STATE] if self._limits.kv_spec.has_state else []
        kinds += [KvKind.WINDOW] if self._limits.ring_pages else []
        for stage in self._stages:
            for kind in kinds:
                programs = stage[kind].programs
                programs.copy(((0, 0, programs.nowhere),))

    def warm_insert(
        self, groups: range, tokens: int, kind: KvKind = KvKind.POSITIONS, codec: str = NO_CODEC
    ) -> None:
        """Compiles the programs that insert a block, by running them for each piece size that peers
        may send."""
        of_kind = self._kind(kind, groups.start)
        programs, targets = of_kind.programs, of_kind.targets
        pull, insert = _empty(groups, tokens, kind, codec)
        layers = programs.layers(groups.start, len(groups))
        for granule in targets.granules():
            resident = targets.target(pull, layers, granule).resident
            parts = resident * (targets.local_heads // granule)
            programs.insert(insert, parts).block_until_ready()

    def warm_restore(self, groups: range, tokens: int, kind: KvKind = KvKind.POSITIONS) -> None:
        pull, insert = _empty(groups, tokens, kind, NO_CODEC, HOST)
        programs = self._kind(kind, groups.start).programs
        programs.insert(insert, (self.target(pull).zeros,)).block_until_ready()

    def warm_pieces(self, groups: range, tokens: int, kind: KvKind = KvKind.POSITIONS) -> None:
        """Programs of a codec are compiled later, at the first request that uses the codec."""
        of_kind = self._kind(kind, groups.start)
        targets, spec = of_kind.targets, of_kind.targets.spec
        rows = spec.rows(of_kind.programs.layers(groups.start, len(groups)))
        shape = (rows, targets.local_heads, tokens, spec.row_width)
        for granule in targets.granules():
            warm_pieces(targets.mesh, shape, jnp.dtype(spec.row_dtype), granule, NO_CODEC)

    def warm_extract(self, groups: range, tokens: int, kind: KvKind = KvKind.POSITIONS) -> None:
        command = ExtractBlock(
            -1, 0, 0, groups.start, 0, 0, tokens, (), groups=len(groups), kind=kind
        )
        self._kind(kind, groups.start).programs.extract(command)[1].block_until_ready()


def _empty(
    groups: range, tokens: int, kind: KvKind, codec: str, peer: str = ""
) -> tuple[PullBlock, InsertBlock]:
    first, count = groups.start, len(groups)
    pull = PullBlock(-1, 0, 0, first, tokens, 0.0, peer, codec, groups=count, kind=kind)
    insert = InsertBlock(-1, 0, 0, first, tokens, 0, 0, (), codec=codec, groups=count, kind=kind)
    return pull, insert
