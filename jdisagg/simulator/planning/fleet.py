"""From a candidate to what runs it: the simulator's fleet, and the configuration and counts that
the live system would be started with.

The same sizes go to both, so that what was predicted is what is configured; of slots a search has
more than any candidate needs, and the configuration as few as carry the prediction (`sized`). Knows
candidates and the simulator; decides nothing."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jdisagg.config import EngineConfig, InstanceConfig, Mode, ModelConfig, PrefixConfig
from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.model_geometry import CostGeometry
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KEPT_NAMES
from jdisagg.simulator.fleet import INSTANCE, Fleet, Pool
from jdisagg.simulator.planning.candidates import ACTIVATIONS, PAGE_TOKENS, Candidate, Site
from jdisagg.simulator.planning.trials import Lost, Runner, TrialRun
from jdisagg.simulator.planning.verdict import Finding
from jdisagg.simulator.run import simulate
from jdisagg.simulator.workloads import Arrival

MIN_CHUNK = 256
# of a hand-off: all but the last part of a chunk's KV moves while the chunk computes
LAYER_GROUPS = 4
MOST_SLOTS = 512


@dataclass(frozen=True)
class FleetMaker:
    """`fused`: a prefill chunk and a decode step of one pool run as one step, as engines of
    Sarathi's kind do; False: in turns, as ours does. `reuse`: KV stays for prompts that the
    workload says begin alike. `hardware`: what a written configuration calls the accelerator.
    `slots`: sequences that decode on a dp rank at once, at most. `weights`: what those of
    `geometry` are quantized to, "": nothing."""

    geometry: CostGeometry
    site: Site
    dtype: str = "bfloat16"
    codec: str = "none"
    fused: bool = True
    reuse: bool = False
    seed: int = 0
    hardware: str = ""
    slots: int = MOST_SLOTS
    weights: str = ""

    def sized(self, finding: Finding, holds: Callable[[Runner], bool]) -> "FleetMaker":
        """With the fewest slots, a power of two and half as many again at least as sequences decode
        on a rank on average, with which what was found still `holds` when it is simulated."""
        decoding = max(
            0.0, (finding.report.latency.mean or 0.0) - (finding.report.ttft.mean or 0.0)
        )
        sequences = (
            finding.rate
            * decoding
            / (finding.candidate.decode_instances * finding.candidate.decode.dp)
        )
        slots = 1 << max(3, math.ceil(math.log2(max(1.0, 1.5 * sequences))))
        while slots < self.slots:
            made = replace(self, slots=slots)
            if holds(made.run):
                return made
            slots *= 2
        return self

    def fleet(self, candidate: Candidate) -> Fleet:
        decode = self._pool(candidate, candidate.decode, candidate.decode_instances)
        prefill = (
            self._pool(candidate, candidate.prefill, candidate.prefill_instances)
            if candidate.prefill
            else None
        )
        return Fleet(
            geometry=self.geometry,
            decode=decode,
            prefill=prefill,
            mode=candidate.mode,
            dtype=self.dtype,
            host_devices=self.site.domain,
            overlap=LAYER_GROUPS,
            fused=self.fused and candidate.mode is Mode.CHUNKED,
            prefix=PrefixConfig(reuse=self.reuse),
            memory_reserve=ACTIVATIONS,
        )

    def run(
        self, candidate: Candidate, arrivals: Sequence[Arrival], lost: Lost | None = None
    ) -> TrialRun:
        """A planner's `Runner`."""
        result = simulate(self.fleet(candidate), arrivals, self.seed, enough=lost)
        return TrialRun(result.outcomes, result.usage, result.stopped)

    def _pool(self, candidate: Candidate, layout: Layout, count: int) -> Pool:
        instance = replace(
            INSTANCE,
            layout=layout,
            page_size=PAGE_TOKENS,
            slots_per_rank=self.slots,
            chunk_tokens=candidate.chunk_tokens,
            min_chunk_tokens=min(MIN_CHUNK, candidate.chunk_tokens),
            codec=self.codec,
        )
        return Pool(count, self.site.described, instance)

    def engine(
        self, candidate: Candidate, model_directory: str, context_tokens: int
    ) -> EngineConfig:
        """What launch.serve and launch.cluster start: one instance of each role."""
        decode = self._instance(candidate, candidate.decode, self.slots)
        prefill = (
            self._instance(candidate, candidate.prefill, max(8, self.slots // 8))
            if candidate.prefill
            else InstanceConfig()
        )
        kept = KEPT_NAMES.get(self.geometry.kv_dtype, "")
        model = ModelConfig(model_directory, self.dtype, context_tokens, self.weights, kept)
        return EngineConfig(
            model=model,
            mode=candidate.mode,
            prefill=prefill,
            decode=decode,
            prefix=PrefixConfig(reuse=self.reuse),
        )

    def _instance(self, candidate: Candidate, layout: Layout, slots: int) -> InstanceConfig:
        room = CostModel(
            self.geometry, self.site.described, layout, dtype=self.dtype
        ).kv_tokens_per_rank(ACTIVATIONS)
        return InstanceConfig(
            layout=layout,
            page_size=PAGE_TOKENS,
            pages_per_rank=room // PAGE_TOKENS,
            slots_per_rank=slots,
            chunk_tokens=candidate.chunk_tokens,
            min_chunk_tokens=min(MIN_CHUNK, candidate.chunk_tokens),
            layer_groups=min(LAYER_GROUPS, self.geometry.layers),
            codec=self.codec,
            hardware=self.hardware,
        )
