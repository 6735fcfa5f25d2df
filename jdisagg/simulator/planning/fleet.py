"""Converts a candidate to a simulated fleet and to a configuration of the live system.

Fleet and configuration have the same sizes, so that predictions hold for the configuration. The
configuration that is written has the smallest number of slots with which the predicted rate is
still reached (`sized`)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jdisagg.config import EngineConfig, InstanceConfig, Mode, ModelConfig, PrefixConfig
from jdisagg.costs.model_geometry import CostGeometry
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KEPT_NAMES
from jdisagg.simulator.fleet import INSTANCE, Fleet, Pool
from jdisagg.simulator.planning.candidates import ACTIVATIONS, PAGE_TOKENS, Candidate, Site
from jdisagg.simulator.planning.stepped import SteppedRunner
from jdisagg.simulator.planning.trials import Loss, Lost, Runner, Runners, TrialRun
from jdisagg.simulator.planning.verdict import Finding
from jdisagg.simulator.run import simulate
from jdisagg.simulator.workloads import Arrival, names_blocks

MIN_CHUNK = 256
# Number of layer groups of a hand-off; all but the last are transferred while the chunk computes.
LAYER_GROUPS = 4
MOST_SLOTS = 512


@dataclass(frozen=True)
class FleetMaker:
    """Builds the simulated fleet and the configuration of a candidate.

    Attributes:
      fused: Whether the chunked mode runs a prefill chunk and a decode step as one step. If not,
        chunks and decode steps alternate.
      draft: Folder of the drafter for the configuration. Pipeline stages load none.
    """

    geometry: CostGeometry
    site: Site
    dtype: str = "bfloat16"
    codec: str = "none"
    fused: bool = True
    reuse: bool = False
    seed: int = 0
    slots: int = MOST_SLOTS
    block_tokens: int = 512
    draft: str = ""

    def sized(self, finding: Finding, holds: Callable[[Runner], bool]) -> "FleetMaker":
        """Returns a maker with the smallest number of slots at which a run still reaches the
        finding's rate.

        The number of slots is a power of two, and at least 1.5 times the mean number of sequences
        that a dp rank decodes.

        Args:
            holds: Returns whether a run still reaches the rate. Called with the simulated or the
                stepped runner, whichever found the rate.
        """
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
            if holds(made.run if finding.simulated else made.runners.stepped):
                return made
            slots *= 2
        return self

    def fleet(self, candidate: Candidate) -> Fleet:
        site = self.site
        decode = self._pool(candidate, site.decodes, candidate.decode, candidate.decode_instances)
        prefill = (
            self._pool(candidate, site, candidate.prefill, candidate.prefill_instances)
            if candidate.prefill
            else None
        )
        return Fleet(
            geometry=self.geometry,
            decode=decode,
            prefill=prefill,
            mode=candidate.mode,
            dtype=self.dtype,
            link=site.between,
            overlap=LAYER_GROUPS,
            fused=self.fused and candidate.mode is Mode.CHUNKED,
            prefix=PrefixConfig(reuse=self.reuse),
            block_tokens=self.block_tokens,
            memory_reserve=ACTIVATIONS,
            software=site.software,
        )

    def run(
        self,
        candidate: Candidate,
        arrivals: Sequence[Arrival],
        lost: Lost | None = None,
        *,
        gaps: bool = False,
    ) -> TrialRun:
        """Stops early when `lost` returns True. `gaps`: whether outcomes have the times between
        tokens. The prefix cache is simulated only if something can be found in it."""
        begun = lost.begun if isinstance(lost, Loss) else None
        maker = self if names_blocks(arrivals) else replace(self, reuse=False)
        fleet = maker.fleet(candidate)
        result = simulate(fleet, arrivals, self.seed, enough=lost, begun=begun, gaps=gaps)
        return TrialRun(result.outcomes, result.usage, result.stopped)

    @property
    def runners(self) -> Runners:
        return Runners(self.run, SteppedRunner(self.site, self.fleet))

    def _pool(self, candidate: Candidate, site: Site, layout: Layout, count: int) -> Pool:
        instance = replace(
            INSTANCE,
            layout=layout,
            page_size=PAGE_TOKENS,
            slots_per_rank=self.slots,
            chunk_tokens=candidate.chunk_tokens,
            min_chunk_tokens=min(MIN_CHUNK, candidate.chunk_tokens),
            gather_steps=candidate.gather_steps,
            codec=self.codec,
        )
        return Pool(count, site.described, instance)

    def engine(
        self, candidate: Candidate, model_directory: str, context_tokens: int
    ) -> EngineConfig:
        decode = self._instance(candidate, self.site.decodes, candidate.decode, self.slots)
        prefill = (
            self._instance(candidate, self.site, candidate.prefill, max(8, self.slots // 8))
            if candidate.prefill
            else InstanceConfig()
        )
        kept = KEPT_NAMES.get(self.geometry.kv_dtype, "")
        weights, draft = self.site.software.weights, "" if candidate.staged else self.draft
        model = ModelConfig(model_directory, self.dtype, context_tokens, weights, kept, draft)
        return EngineConfig(
            model=model,
            mode=candidate.mode,
            prefill=prefill,
            decode=decode,
            prefix=PrefixConfig(reuse=self.reuse),
        )

    def _instance(
        self, candidate: Candidate, site: Site, layout: Layout, slots: int
    ) -> InstanceConfig:
        model = site.cost_model(self.geometry, layout, self.dtype)
        room = model.kv_tokens_per_rank(ACTIVATIONS)
        # Equal on both sides, and divisible by the numbers of stages, which are powers of two.
        stages = max(candidate.decode.pp, candidate.prefill.pp if candidate.prefill else 1)
        return InstanceConfig(
            layout=layout,
            page_size=PAGE_TOKENS,
            pages_per_rank=room // PAGE_TOKENS,
            slots_per_rank=slots,
            chunk_tokens=candidate.chunk_tokens,
            min_chunk_tokens=min(MIN_CHUNK, candidate.chunk_tokens),
            gather_steps=candidate.gather_steps,
            layer_groups=min(max(LAYER_GROUPS, stages), self.geometry.layers),
            codec=self.codec,
            hardware=site.hardware,
        )
