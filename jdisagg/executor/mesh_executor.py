"""The JAX executor: runs step commands on one mesh, in order, on its two threads.

It obeys: it knows pages, slots and offers by number and keeps no account of who owns them; that is
the scheduler's. One instance may prefill, decode, or both (one-mesh modes); it builds only the
programs that its role uses. All device state (pages, slots, offered and pulled blocks) belongs to
the dispatch thread."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp

from jdisagg.executor.block_programs import BlockPrograms
from jdisagg.executor.block_sums import ChunkSums, PrefillSums
from jdisagg.executor.choose import Variant
from jdisagg.executor.decode_program import DecodePrograms
from jdisagg.executor.grammar_rows import GrammarRows, longest_run
from jdisagg.executor.page_pool import Pools
from jdisagg.executor.prefill_program import ChunkArrays, ChunkForm, PrefillPrograms
from jdisagg.executor.prefill_sampler import PrefillSampler
from jdisagg.executor.programs import Programs
from jdisagg.executor.prompt_scorer import PromptScorer
from jdisagg.executor.pull_targets import PullTargets
from jdisagg.executor.results import (
    BlockReading,
    DecodeReading,
    Finished,
    PrefillReading,
    PullReading,
    start_reading,
)
from jdisagg.executor.saved_blocks import SavedBlocks
from jdisagg.executor.slot_state import RowFormat
from jdisagg.executor.weights import Weights, mesh_shards, split_model
from jdisagg.executor.work_threads import Waiting, WorkThreads
from jdisagg.grammar.compiler import GrammarCompiler
from jdisagg.layout.axes import Layout
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.messages.step_commands import (
    HOST,
    ConnectPeer,
    CopyPages,
    DecodeSteps,
    DisconnectPeer,
    DropBlocks,
    ExtractBlock,
    FindSaved,
    InsertBlock,
    LoadBlock,
    PrefillChunk,
    PullBlock,
    ReleaseOffers,
    RemoveSaved,
    SaveBlock,
    StepCommand,
    StepResult,
)
from jdisagg.model_api import Model
from jdisagg.scheduler.blocks import layer_groups
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.transfer.boxes import mesh_card
from jdisagg.transfer.channel import Channel, Pull, PullTarget
from jdisagg.transfer.codec import check_codec
from jdisagg.transfer.host_store import HostStore
from jdisagg.transfer.pieces import NO_CODEC, warm_blanks, warm_pieces

QUIET_SECONDS = 0.2  # without a command; longer than those of work under way lie apart


@dataclass(frozen=True)
class MeshRole:
    """What an instance does. `emit`: prefilled KV is returned and offered. `codec`: how blocks come
    to it. `extracts`: it may send what lies in its pages: running sequences that it hands on (and
    takes those of others), or what it has kept. `host_tokens`: of the blocks that it keeps in host
    memory; 0: it keeps none there. `spills`: it sets sequences aside there. `disk`: the directory
    of the blocks that it keeps on disk; empty: none. `peer_tokens`: of the blocks that a mesh which
    does not decode fetches from others; 0: it fetches none."""

    prefill: bool
    decode: bool
    emit: bool = False
    codec: str = "none"
    extracts: bool = False
    host_tokens: int = 0
    spills: bool = False
    disk: str = ""
    peer_tokens: int = 0


class MeshExecutor:
    """Implements `scheduler.executor.Executor`."""

    def __init__(
        self,
        name: str,
        model: Model,
        programs: Programs,
        layout: Layout,
        limits: MeshLimits,
        role: MeshRole,
        channel: Channel,
    ) -> None:
        self.limits = limits
        self.role = role
        self.mesh = mesh = programs.mesh
        self.card = mesh_card(mesh)
        check_codec(role.codec, limits.kv_spec)  # not at the first pull, and so for all its parts
        self.platform = platform = programs.platform
        self.programs = programs
        self._channel = channel
        self._weights: Weights = split_model(model, layout)
        self._shards = mesh_shards(mesh, layout, platform)
        self._rows = RowFormat(-(-limits.context_tokens // limits.page_size), model.vocabulary)
        self._pools = pools = Pools.of(programs, limits)
        self._pool = pools.pages
        spec = limits.kv_spec
        self._groups = layer_groups(limits.sent.positioned, len(spec.layers), limits.layer_groups)
        self._sums = (
            PrefillSums(self.programs, limits.sent, self._groups, limits.granule_tokens)
            if role.emit
            else None
        )
        self._prefill = PrefillPrograms(
            self.programs,
            self._weights,
            self._shards,
            pools,
            self._groups,
            self._sums,
            limits.granule_tokens,
        )
        self._grammars = GrammarRows(model.vocabulary, longest_run(limits), platform)
        self._sampler = PrefillSampler(
            self.programs, self._weights, self._shards, limits, self._rows, self._grammars
        )
        self._scorer = PromptScorer(self.programs, self._weights, self._shards, model.vocabulary)
        self._blocks = BlockPrograms(programs, self._pool.view(limits.sent), self._groups)
        # all layers' states are one group
        everything = (range(len(spec.layers)),)
        self._state_blocks = BlockPrograms(programs, pools.states, everything, "state")
        # without components where they are not sent apart
        windowed = spec.windowed if limits.windows_apart else limits.nothing
        held = pools.rings if limits.ring_pages else pools.pages.view(windowed)
        groups = (
            layer_groups(windowed.positioned, len(spec.layers), limits.window_groups)
            if limits.windows_apart
            else ()
        )
        self._window_blocks = BlockPrograms(programs, held, groups, "window")
        self._decode = (
            DecodePrograms(
                self.programs,
                self._weights,
                self._shards,
                pools,
                limits,
                self._rows,
                self._grammars,
            )
            if role.decode
            else None
        )
        self._wanted_logprobs: dict[tuple[int, int], int | None] = {}
        self._pulls: dict[int, Pull] = {}
        self._targets = PullTargets(programs, limits.sent)
        self._state_targets = PullTargets(programs, spec.state)
        self._window_targets = PullTargets(programs, windowed)
        self.host = HostStore(name)
        self._saved = SavedBlocks(role.disk, name, self.host, mesh.shape["kv"])
        self._threads = WorkThreads(name)

    @property
    def pool_bytes(self) -> int:
        """Of the pages, states and rings of all layers, on all devices together."""
        return self._pools.bytes

    def run(self, command: StepCommand) -> asyncio.Future[StepResult]:
        return self._threads.submit(lambda: self._issue(command))

    def on_dispatch_thread(self, work: Callable[[], None]) -> asyncio.Future[StepResult]:
        """Runs `work` between commands (warm-up, inspection); resolves when it returned."""

        def issue() -> Waiting:
            work()
            return Finished(-1)

        return self._threads.submit(issue, beside=True)

    async def quiet(self) -> None:
        """Returns when no command has come for `QUIET_SECONDS` and none is under way."""
        await self._threads.quiet(QUIET_SECONDS)

    def close(self) -> None:
        self._saved.close()
        self._threads.close()
        self.host.close()

    def expect(self, card: MeshCard) -> None:
        """Blocks will come from a mesh like this one: warm-up prepares for it, and a pull that
        names no peer means it. Before the first command."""
        self._connect("", card)

    def constrain(self, grammars: GrammarCompiler | None) -> None:
        """Grammars are compiled by this; None: nobody asks for any. Before the first command, and
        before warm-up."""
        self._grammars.compiler = grammars

    def issue_and_wait(self, command: StepCommand) -> StepResult:
        """Runs a command on the calling thread: for warm-up and tests, while the threads are
        idle."""
        return self._issue(command).result()

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Those that may come: masked ones where grammars can be compiled."""
        masked = self._grammars.compiler is not None
        return tuple(variant for variant in Variant if masked or not variant.masked)

    def warm_prefill(self, width: int, form: ChunkForm) -> None:
        """Runs a chunk of padding, and every cut that its rows may ask for."""
        x, blocks, _ = self._prefill.run(
            ChunkArrays.build(PrefillChunk(-1, width, ()), self.limits.computed, form)
        )
        for band, tokens in self.limits.block_shapes() if blocks else ():
            if tokens <= width:
                self._blocks.cut(blocks[band.start : band.stop], 0, 0, tokens)
        x.block_until_ready()
        for variant in self.variants if form.samples else ():
            self._sampler.warm_up(variant, x)

    def warm_decode(self, size: int, variant: Variant) -> None:
        """Runs a step of `size` rows, none of them anybody's."""
        assert self._decode is not None
        nobody = (self.limits.slots_per_rank,) * size
        stepped = self._decode.step((nobody,) * self.limits.ranks, variant)
        stepped.chosen.token.block_until_ready()
        if variant is Variant.MASKED:
            self._decode.warm_runs(size)

    def warm_updates(self) -> None:
        """Runs what admits, grows, sets counts and copies pages."""
        assert self._decode is not None
        self._decode.warm_updates()
        self._blocks.copy(((0, 0, self._pool.rank_rows),))
        if self.limits.kv_spec.has_state:
            self._state_blocks.copy(((0, 0, self._pools.states.rank_rows),))
        if self.limits.ring_pages:
            self._window_blocks.copy(((0, 0, self._pools.rings.rank_rows),))

    def warm_insert(self, band: range, tokens: int, window: bool = False) -> None:
        """Inserts blocks of which no token is valid, in pieces as peers may send them. `window`: of
        the layers with a window."""
        codec, groups = self.role.codec, len(band)
        pull = PullBlock(
            -1, 0, 0, band.start, tokens, 0.0, codec=codec, groups=groups, window=window
        )
        nothing = InsertBlock(
            -1, 0, 0, band.start, tokens, 0, 0, (), codec=codec, groups=groups, window=window
        )
        blocks, targets = self._blocks_of(pull), self._targets_of(pull)
        local_heads = targets.spec.row_heads // self.mesh.shape["kv"]
        layers = blocks.layers(band.start, len(band))
        for granule in targets.granules():
            resident = targets.target(pull, layers, granule).resident
            if self.card.ends and self.platform == "gpu":
                warm_blanks(resident)
            blocks.insert(nothing, resident * (local_heads // granule)).block_until_ready()

    def warm_restore(self, band: range, tokens: int) -> None:
        """Inserts a block from host memory of which no token is valid."""
        groups = len(band)
        pull = PullBlock(-1, 0, 0, band.start, tokens, 0.0, HOST, groups=groups)
        nothing = InsertBlock(-1, 0, 0, band.start, tokens, 0, 0, (), groups=groups)
        self._blocks.insert(nothing, (self._host_target(pull).zeros,)).block_until_ready()

    def warm_pieces(self, band: range, tokens: int, window: bool = False) -> None:
        """Cuts a block of this mesh in pieces as peers of other processes may want them. (A codec's
        programs are compiled when a receiver first wants it.)"""
        blocks = self._window_blocks if window else self._blocks
        targets = self._window_targets if window else self._targets
        spec = targets.spec
        rows = spec.rows(blocks.layers(band.start, len(band)))
        shape = (rows, spec.row_heads // self.mesh.shape["kv"], tokens, spec.row_width)
        for granule in targets.granules():
            warm_pieces(self.mesh, shape, jnp.dtype(spec.row_dtype), granule, NO_CODEC)

    def warm_extract(self, band: range, tokens: int, window: bool = False) -> None:
        """Extracts a block of which no token is valid."""
        command = ExtractBlock(
            -1, 0, 0, band.start, 0, 0, tokens, (), groups=len(band), window=window
        )
        self._blocks_of(command).extract(command)[1].block_until_ready()

    def warm_states(self) -> None:
        """What `warm_insert`, `warm_extract` and `warm_pieces` do, of states."""
        nothing = ExtractBlock(-1, 0, 0, 0, 0, 0, 1, (), state=True)
        if self.role.extracts or self.role.emit:
            self._state_blocks.extract(nothing)[1].block_until_ready()
        local_heads = self._pools.states.spec.row_heads // self.mesh.shape["kv"]
        pull = PullBlock(-1, 0, 0, 0, 1, 0.0, state=True)
        insert = InsertBlock(-1, 0, 0, 0, 1, 0, 0, (), state=True)
        layers = self._state_blocks.layers(0, 1)
        spec = self._pools.states.spec
        shape = (spec.rows(layers), local_heads, 1, spec.row_width)
        for granule in self._state_targets.granules():
            if self.card.ends and (self.role.extracts or self.role.emit):
                warm_pieces(self.mesh, shape, jnp.dtype(spec.row_dtype), granule, NO_CODEC)
            if self.role.decode:
                resident = self._state_targets.target(pull, layers, granule).resident
                parts = resident * (local_heads // granule)
                self._state_blocks.insert(insert, parts).block_until_ready()

    def pull_target(self, block: PullBlock) -> PullTarget:
        """Where a block goes on this mesh. On the dispatch thread."""
        layers = self._blocks_of(block).layers(block.group, block.groups)
        return self._targets_of(block).of_pull(block, layers)

    def _blocks_of(self, command: PullBlock | InsertBlock | ExtractBlock) -> BlockPrograms:
        if command.window:
            return self._window_blocks
        return self._state_blocks if command.state else self._blocks

    def _targets_of(self, command: PullBlock) -> PullTargets:
        if command.window:
            return self._window_targets
        return self._state_targets if command.state else self._targets

    def _connect(self, peer: str, card: MeshCard) -> None:
        self._targets.connect(peer, card)
        if self.limits.kv_spec.has_state:
            self._state_targets.connect(peer, card)
        if self.limits.windows_apart:
            self._window_targets.connect(peer, card)

    def _host_target(self, block: PullBlock) -> PullTarget:
        """Of a block that lies in host memory as it lay on this mesh: in one piece a device."""
        layers = self._blocks.layers(block.group, block.groups)
        local_heads = self.limits.kv_spec.row_heads // self.mesh.shape["kv"]
        return self._targets.target(block, layers, local_heads)

    def _issue(self, command: StepCommand) -> Waiting:
        match command:
            case PrefillChunk():
                return self._run_prefill(command)
            case DecodeSteps():
                return self._run_decode(command)
            case PullBlock():
                return self._run_pull(command)
            case InsertBlock():
                arrays = self._pulls.pop(command.offer_id).arrays()
                found = self._blocks_of(command).insert(command, arrays)
                start_reading((found,))
                return BlockReading(command.step, command.offer_id, found)
            case DropBlocks():
                for offer_id in command.offer_ids:
                    if pull := self._pulls.pop(offer_id, None):
                        pull.cancel()
            case ReleaseOffers():
                release = self.host.forget if command.from_host else self._channel.release
                for offer_id in command.offer_ids:
                    release(offer_id)
            case FindSaved() | SaveBlock() | LoadBlock() | RemoveSaved():
                return self._saved.issue(command)
            case CopyPages():
                self._blocks.copy(command.copies)
                if self.limits.kv_spec.has_state:
                    self._state_blocks.copy(command.states)
                self._window_blocks.copy(self._ring_copies(command))
            case ConnectPeer():
                self._connect(command.peer, command.card)
                self._channel.connect(command.peer, command.card)
            case DisconnectPeer():
                self._targets.disconnect(command.peer)
                self._state_targets.disconnect(command.peer)
                self._window_targets.disconnect(command.peer)
                self._channel.disconnect(command.peer)
            case ExtractBlock():
                block, found, stamp = self._blocks_of(command).extract(command)
                if command.to_host:
                    copy = self.host.put(command.offer_id, block, command.rank)
                    start_reading((found,))
                    return BlockReading(
                        command.step, command.offer_id, found, True, in_order=False, copy=copy
                    )
                self._channel.offer(
                    command.offer_id, block, command.rank, stamp.of_offer(command.offer_id)
                )
                start_reading((found,))
                return BlockReading(command.step, command.offer_id, found, extracted=True)
        return Finished(command.step)

    def _ring_copies(self, command: CopyPages) -> tuple[tuple[int, int, int], ...]:
        """The pages of the slots that are copied."""
        size = self.limits.ring_pages
        return tuple(
            (rank, source * size + page, destination * size + page)
            for rank, source, destination in command.states
            for page in range(size)
        )

    def _run_prefill(self, command: PrefillChunk) -> Waiting:
        chunk = ChunkArrays.build(command, self.limits.computed, platform=self.platform)
        x, blocks, sums = self._prefill.run(chunk)
        # before all that is offered: somebody waits for the first token
        chosen = self._sampler.run(command, x, chunk.form.every_token)
        scores = self._scorer.run(command, x) if chunk.form.every_token else None
        start_reading((*(chosen or ()), *sums, *(scores or ())))
        for row in command.rows:
            for offer in row.offers:
                assert self._sums is not None, "this instance hands nothing off"
                band = blocks[offer.group : offer.group + offer.groups]
                block = self._blocks.cut(band, row.rank, offer.offset, offer.block_tokens)
                at = offer.offset - row.offset
                valid = min(offer.block_tokens, len(row.tokens) - at)
                stamp = self._sums.stamp(offer.group, command.checksum_key, row.start + at, valid)
                self._channel.offer(offer.offer_id, block, row.rank, stamp.of_offer(offer.offer_id))
        return PrefillReading(
            command, x, chosen, ChunkSums(command, self.limits.granule_tokens, sums), scores=scores
        )

    def _run_decode(self, command: DecodeSteps) -> Waiting:
        assert self._decode is not None, "this instance has no decode programs"
        if command.admits or command.grows:
            self._decode.update(command.admits, command.grows)
            self._grammars.admit(command.admits, command.grows)
            for admit in command.admits:
                self._wanted_logprobs[admit.rank, admit.slot] = admit.sample.sampling.logprobs
        variant = Variant.of(command.sampled, command.shaped, command.masked)
        stepped = [self._decode.step(command.slots, variant) for _ in range(command.steps)]
        for step in stepped:
            start_reading(step.chosen)
        wanted: tuple[tuple[int | None, ...], ...] = tuple(() for _ in command.slots)
        if variant.shaped:
            wanted = tuple(
                tuple(self._wanted_logprobs.get((rank, slot)) for slot in row)
                for rank, row in enumerate(command.slots)
            )
        return DecodeReading(command, stepped, wanted)

    def _run_pull(self, command: PullBlock) -> Waiting:
        if command.peer == HOST:
            target = self._host_target(command)
            pull = self.host.pull(command.offer_id, target, command.deadline_seconds)
        else:
            pull = self._channel.pull(
                command.offer_id, self.pull_target(command), command.deadline_seconds
            )
        self._pulls[command.offer_id] = pull
        return PullReading(command.step, command.offer_id, pull)
