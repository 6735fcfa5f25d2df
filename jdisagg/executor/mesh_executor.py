"""The JAX executor: runs step commands on one mesh, in order, on two threads. With pipeline stages,
the two threads drive the meshes of all stages.

Commands identify pages, slots and offers by number. Only the scheduler tracks which sequence owns
them. All device state (pages, slots, offered and pulled blocks) belongs to the dispatch thread."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax

from jdisagg.executor.adapter_slots import AdapterSlots, adapter_size
from jdisagg.executor.block_programs import MeshBlocks
from jdisagg.executor.block_sums import ChunkSums, PrefillSums
from jdisagg.executor.decode_program import DecodePrograms
from jdisagg.executor.decode_stages import DecodeStages
from jdisagg.executor.draft_rows import Guess
from jdisagg.executor.expert_reader import ExpertReader
from jdisagg.executor.grammar_rows import GrammarRows
from jdisagg.executor.image_programs import ImagePrograms
from jdisagg.executor.mixed_program import MixedPrograms
from jdisagg.executor.page_pool import Pools
from jdisagg.executor.prefill_program import (
    ChunkArrays,
    ChunkForm,
    PrefillPrograms,
    asks_of_prompts,
)
from jdisagg.executor.prefill_sampler import PrefillSampler
from jdisagg.executor.prefill_stages import PrefillStages
from jdisagg.executor.programs import MissingProgram, Programs
from jdisagg.executor.prompt_scorer import PromptScorer
from jdisagg.executor.results import (
    DecodeReading,
    Finished,
    MixedReading,
    PrefillReading,
    StepChoice,
    start_reading,
)
from jdisagg.executor.saved_blocks import SavedBlocks
from jdisagg.executor.slot_state import RowFormat
from jdisagg.executor.weight_swaps import WeightSwaps
from jdisagg.executor.weights import Weights, mesh_shards, split_model
from jdisagg.executor.work_threads import Waiting, WorkThreads
from jdisagg.grammar.compiler import GrammarCompiler
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KvKind
from jdisagg.layout.mesh_card import MeshCard
from jdisagg.messages.step_commands import (
    ConnectPeer,
    CopyPages,
    DecodeSteps,
    DisconnectPeer,
    DropBlocks,
    DropWeights,
    ExtractBlock,
    FindSaved,
    InsertBlock,
    LoadBlock,
    OfferWeights,
    PrefillChunk,
    PullBlock,
    PutAdapter,
    PutWeights,
    ReadAdapter,
    ReadWeights,
    ReleaseOffers,
    RemoveSaved,
    SaveBlock,
    SleepMesh,
    StepCommand,
    StepResult,
    WakeMesh,
)
from jdisagg.model_api import Model, Shards
from jdisagg.scheduler.blocks import layer_groups, stage_layers
from jdisagg.scheduler.executor import MeshLimits
from jdisagg.transfer.channel import Channel, PullTarget, mesh_card
from jdisagg.transfer.codec import check_codec
from jdisagg.transfer.host_store import HostStore
from jdisagg.transfer.pieces import NO_CODEC


@dataclass(frozen=True)
class MeshRole:
    """Capabilities that a mesh's executor needs.

    Attributes:
        decode: Whether the mesh decodes. If it also prefills, and `emit` is set, its worker does
            the one or the other (`MeshExecutor.choose_chunks`).
        emit: Whether blocks of prefill chunks are sent to decode workers.
        extracts: Whether the mesh sends blocks that it reads from its pages: KV of running
            sequences, or of the prefix cache.
        host_tokens: Number of tokens in the longest cached block in host memory. 0 without a prefix
            cache in host memory.
        tails: Whether host memory also has blocks of fewer tokens (`scheduler/block_names.py`).
        disk: Directory of the prefix cache on disk. "" without a prefix cache on disk.
        peer_tokens: Number of tokens in the longest block that the mesh fetches from other workers'
            prefix caches. 0 if it fetches none.
    """

    prefill: bool
    decode: bool
    emit: bool = False
    codec: str = "none"
    extracts: bool = False
    host_tokens: int = 0
    tails: bool = False
    disk: str = ""
    peer_tokens: int = 0


class MeshExecutor:
    """Implements `scheduler.executor.Executor` with JAX on one mesh."""

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
        self.name = name
        self.limits = limits
        self.role = role
        self.choose_chunks(every_prompt=role.prefill)
        self.mesh = mesh = programs.mesh
        self.card = mesh_card(mesh)
        check_codec(role.codec, limits.kv_spec)  # here rather than at the first pull
        self.platform = platform = programs.platform
        self.programs, self._channel = programs, channel
        self._shards = mesh_shards(mesh, layout, platform)
        columns = -(-limits.context_tokens // limits.page_size)
        self._rows = RowFormat(columns, model.vocabulary, limits.adapters > 0, limits.spatial)
        self._groups = layer_groups(
            limits.sent.cuts, len(limits.kv_spec.layers), limits.layer_groups
        )
        self._stages = _stages(programs, model, layout, limits)
        self._pool = self._stages[0].pools.pages
        held = [stage.pools.pages.held for stage in self._stages]
        stage_of = [
            next(at for at, layers in enumerate(held) if group.start in layers)
            for group in self._groups
        ]
        self.images = _image_programs(self._stages[0], self._shards, limits, role)
        sums = [self._prefill_sums(stage.programs) for stage in self._stages]
        self._sums = sums[0]
        prefill = [
            (stage.programs, PrefillPrograms(*stage, self._shards, self._groups, of_stage, limits))
            for stage, of_stage in zip(self._stages, sums, strict=True)
        ]
        self._prefill = PrefillStages(prefill, stage_of, self.images)
        self._grammars = GrammarRows(
            model.vocabulary, limits.longest_run, platform, limits.state_snapshot_tokens
        )
        last = self._stages[-1]
        self._sampler = PrefillSampler(
            last.programs, last.weights, self._shards, limits, self._rows, self._grammars
        )
        self._scorer = PromptScorer(
            last.programs, last.weights, self._shards, model.vocabulary, limits.rows_per_chunk
        )
        reads = limits.kv_spec.records
        self._experts = ExpertReader(last.programs, last.pools, limits) if reads else None
        self._decode = self._decode_stages() if role.decode else None
        self._mixed = (
            MixedPrograms(*last, self._shards, limits, self._rows, self._decode.only)
            if self._decode and limits.mixed_buckets
            else None
        )
        self.adapters = AdapterSlots([stage[:2] for stage in self._stages], model, limits)
        self.swaps = WeightSwaps(self._stages, model, layout, limits)
        self._wanted_logprobs: dict[tuple[int, int], int] = {}  # by (rank, slot)
        self.host = HostStore(name)
        pools = [(stage.programs, stage.pools) for stage in self._stages]
        self.blocks = MeshBlocks(pools, stage_of, limits, self._groups, channel, self.host)
        part = _part_of_instance(mesh, len(self._stages))
        part += " experts" * limits.kv_spec.records
        self._saved = SavedBlocks(role.disk, name, self.host, mesh.shape["kv"], part)
        self._threads = WorkThreads(name)

    def choose_chunks(self, every_prompt: bool) -> None:
        """Sets whether the worker computes every prompt, or only what the router leaves to it, so
        that other forms of chunks are compiled (`MeshLimits.computed_by`). Must be called while no
        command runs."""
        self._computed = self.limits.computed_by(every_prompt)

    def _prefill_sums(self, programs: Programs) -> PrefillSums | None:
        limits = self.limits
        if not self.role.emit:
            return None
        return PrefillSums(programs, limits.sent, self._groups, limits.granule_tokens)

    def _decode_stages(self) -> DecodeStages:
        how = self._shards, self.limits, self._rows, self._grammars
        return DecodeStages(
            [(stage.programs, DecodePrograms(*stage, *how)) for stage in self._stages]
        )

    @property
    def pool_bytes(self) -> int:
        """Total size in bytes of the KV pages, recurrent states and ring buffers of all layers,
        summed over devices."""
        return sum(stage.pools.bytes for stage in self._stages)

    def run(self, command: StepCommand) -> asyncio.Future[StepResult]:
        return self._threads.submit(lambda: self._issue(command))

    def on_dispatch_thread(self, work: Callable[[], object]) -> asyncio.Future[StepResult]:
        """Runs the function `work` on the dispatch thread between commands, and returns a future of
        its result."""

        def issue() -> Waiting:
            work()
            return Finished(-1)

        return self._threads.submit(issue)

    async def on_compiled(self, work: Callable[[], object]) -> None:
        """Runs `work` on the dispatch thread. If `work` needs a program that is not compiled, the
        program is compiled on another thread, beside others, and `work` runs again from its
        beginning. `work` must therefore be repeatable."""
        missing: list[MissingProgram] = []

        def attempt() -> None:
            try:
                with self.programs.only_compiled():
                    work()
            except MissingProgram as program:
                missing.append(program)

        await self.on_dispatch_thread(attempt)
        while missing:
            await asyncio.to_thread(missing.pop().compile)
            await self.on_dispatch_thread(attempt)

    def close(self) -> None:
        self._saved.close()
        self.adapters.close()
        self.swaps.close()
        self._threads.close()
        self.host.close()

    def expect(self, card: MeshCard) -> None:
        """Warm-up compiles programs for the piece sizes of this peer, and pulls that name no mesh
        pull from it. Must be called before the first command."""
        self.blocks.connect("", card)

    def constrain(self, grammars: GrammarCompiler | None) -> None:
        """With None, requests with a grammar are refused. Must be called before warm-up."""
        self._grammars.compiler = grammars

    def issue_and_wait(self, command: StepCommand) -> StepResult:
        """Runs a command on the calling thread and returns its result. For warm-up and tests, while
        the executor's threads are idle."""
        return self._issue(command).result()

    @property
    def grammars(self) -> bool:
        return self._grammars.compiler is not None

    def warm_prefill(self, width: int, form: ChunkForm, sends: bool = True) -> None:
        chunk = ChunkArrays.build(PrefillChunk(-1, width, ()), self.limits, form)
        x, blocks, _ = self._prefill.run(chunk)
        for groups, tokens in self.limits.block_shapes() if sends and blocks else ():
            if tokens <= width:
                self._prefill.cut(blocks, groups, 0, 0, tokens)
        self._sampler.warm_up(x)
        if self._experts is not None:
            self._experts.warm_up(None)

    def warm_pictured(self, width: int, form: ChunkForm) -> None:
        assert self.images is not None
        chunk = ChunkArrays.build(PrefillChunk(-1, width, ()), self.limits, form)
        self._prefill.run(chunk, self.images.nothing_added(width))[0].block_until_ready()

    def warm_decode(self, size: int) -> None:
        assert self._decode is not None
        self._decode.warm_up(size)

    def warm_pair(self, size: int, drafts: bool) -> None:
        assert self._decode is not None
        self._decode.warm_pair(size, drafts)

    def warm_mixed(self, width: int) -> None:
        assert self._mixed is not None
        self._mixed.warm_up(width)

    def warm_updates(self) -> None:
        assert self._decode is not None
        self._decode.warm_updates()
        self.blocks.warm_copy()
        if self._experts is not None:
            self._experts.warm_up(self._decode.only.hot)

    def warm_insert(
        self, groups: range, tokens: int, kind: KvKind = KvKind.POSITIONS, codec: str | None = None
    ) -> None:
        """`codec`: None is that of the mesh. Recurrent state is sent without a codec."""
        codec = NO_CODEC if kind is KvKind.STATE else codec or self.role.codec
        self.blocks.warm_insert(groups, tokens, kind, codec)

    def pull_target(self, block: PullBlock) -> PullTarget:
        """Must be called on the dispatch thread."""
        return self.blocks.target(block)

    def _issue(self, command: StepCommand) -> Waiting:
        match command:
            case PrefillChunk():
                return self._run_prefill(command)
            case DecodeSteps():
                return self._run_decode(command)
            case PullBlock():
                return self.blocks.pull(command)
            case InsertBlock():
                return self.blocks.insert(command)
            case ExtractBlock():
                return self.blocks.extract(command)
            case DropBlocks():
                self.blocks.drop(command)
            case CopyPages():
                self.blocks.copy(command)
            case ReleaseOffers():
                release = self.host.forget if command.from_host else self._channel.release
                for offer_id in command.offer_ids:
                    release(offer_id)
            case ReadAdapter():
                return self.adapters.read(command)
            case PutAdapter():
                self.adapters.put(command)
            case ReadWeights():
                return self.swaps.read(command)
            case OfferWeights():
                return self.swaps.offer(command)
            case PutWeights() | DropWeights() | SleepMesh() | WakeMesh():
                self.swaps.change(command)
                if self.images is not None:
                    self.images.change(command)
            case FindSaved() | SaveBlock() | LoadBlock() | RemoveSaved():
                return self._saved.issue(command)
            case ConnectPeer():
                self.blocks.connect(command.peer, command.card)
                self._channel.connect(command.peer, command.card)
            case DisconnectPeer():
                self.blocks.disconnect(command.peer)
                self._channel.disconnect(command.peer)
        return Finished(command.step)

    def _run_prefill(self, command: PrefillChunk) -> PrefillReading:
        chunk = ChunkArrays.build(command, self._computed, platform=self.platform)
        x, blocks, sums = self._prefill.run(chunk)
        # First tokens are sampled before blocks are cut and offered, because the client waits for
        # them.
        chosen = self._sampler.run(command, x, chunk.form.every_token)
        asked = asks_of_prompts(command)
        scores = self._scorer.run(command, x, chunk.form.every_token) if asked else ()
        start_reading((*(chosen or ()), *sums, *scores))
        for row in command.rows:
            for offer in row.offers:
                assert self._sums is not None, "this instance hands nothing off"
                groups = range(offer.group, offer.group + offer.groups)
                block = self._prefill.cut(
                    blocks, groups, row.rank, offer.offset, offer.block_tokens
                )
                at = offer.offset - row.offset
                valid = min(offer.block_tokens, len(row.tokens) - at)
                stamp = self._sums.stamp(offer.group, command.checksum_key, row.start + at, valid)
                self._channel.offer(offer.offer_id, block, row.rank, stamp.of_offer(offer.offer_id))
        found = ChunkSums(command, self.limits.granule_tokens, sums)
        experts = self._experts.of_prompts(command) if self._experts else {}
        start_reading(array for one in experts.values() for array in one.parts)
        return PrefillReading(command, x, chosen, found, scores=scores, experts=experts)

    def _run_decode(self, command: DecodeSteps) -> Waiting:
        assert self._decode is not None, "this instance has no decode programs"
        if command.chunk is not None:
            return self._run_mixed(command, command.chunk)
        self._update_slots(command)
        guesses = {
            (one.rank, one.row): Guess(one.start, one.tokens, one.count) for one in command.drafts
        }
        steps = [
            self._decode.step(command.slots, command.masked, {} if number else guesses)
            for number in range(command.steps)
        ]
        return self._reading(command, steps)

    def _run_mixed(self, command: DecodeSteps, part: PrefillChunk) -> MixedReading:
        assert self._decode is not None and command.steps == 1
        chunk = self._mixed.arrays(part) if self._mixed else None
        if self._mixed is None or chunk is None:
            prefill = self._run_prefill(part)
            self._update_slots(command)
            step = self._decode.step(command.slots, command.masked)
        else:
            self._update_slots(command)
            x, step = self._mixed.run(chunk, command.slots, command.masked)
            chosen = self._sampler.run(part, x)
            start_reading(chosen or ())
            sums = ChunkSums(part, self.limits.granule_tokens, [])
            prefill = PrefillReading(part, x, chosen, sums)
        return MixedReading(prefill, self._reading(command, [step]))

    def _update_slots(self, command: DecodeSteps) -> None:
        assert self._decode is not None
        if command.admits or command.grows:
            self._decode.update(command.admits, command.grows)
            self._grammars.admit(command.admits, command.grows)
            if self._experts is not None:
                self._experts.note(command)
            for admit in command.admits:
                wanted = admit.sample.sampling.logprobs
                self._wanted_logprobs.pop((admit.rank, admit.slot), None)
                if wanted is not None:
                    self._wanted_logprobs[admit.rank, admit.slot] = wanted

    def _reading(self, command: DecodeSteps, steps: list[StepChoice]) -> DecodeReading:
        wanted: tuple[tuple[int | None, ...], ...] = ()
        if self._wanted_logprobs:
            wanted = tuple(
                tuple(self._wanted_logprobs.get((rank, slot)) for slot in row)
                for rank, row in enumerate(command.slots)
            )
        experts = None
        if self._experts is not None and self._decode is not None:
            experts = self._experts.of_steps(command, self._decode.only.hot)
            start_reading(experts.parts if experts else ())
        reading = DecodeReading(command, steps, wanted, experts)
        for chosen in steps:
            chosen.start_reading(reading.scored)
        return reading


class _Stage(NamedTuple):
    programs: Programs
    weights: Weights
    pools: Pools


def _stages(programs: Programs, model: Model, layout: Layout, limits: MeshLimits) -> list[_Stage]:
    layers, size = len(limits.kv_spec.layers), adapter_size(limits)
    if not programs.later:
        weights = split_model(model, layout, size, [programs.zeros] * layers)
        return [_Stage(programs, weights, Pools.of(programs, limits))]
    groups, count = limits.layer_groups, len(programs.stages)
    held = stage_layers(limits.sent.cuts, layers, groups, count)
    zeros = [stage.zeros for stage, of in zip(programs.stages, held, strict=True) for _ in of]
    weights = split_model(model, layout, size, zeros)
    return [
        _Stage(stage, weights.of_stage(of), Pools.of(stage, limits, of))
        for stage, of in zip(programs.stages, held, strict=True)
    ]


def _image_programs(
    first: _Stage, shards: Shards, limits: MeshLimits, role: MeshRole
) -> ImagePrograms | None:
    if limits.images is None or not (role.prefill or limits.append_buckets):
        return None
    return ImagePrograms(first.programs, first.weights, shards, limits.images, limits.image_rows)


def _part_of_instance(mesh: jax.sharding.Mesh, stages: int) -> str:
    processes = {device.process_index for device in mesh.devices.flat}
    place = f" {jax.process_index()}/{len(processes)}" if len(processes) > 1 else ""
    return place + (f" {stages} stages" if stages > 1 else "")
