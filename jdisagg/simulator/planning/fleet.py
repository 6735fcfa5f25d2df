"""Converts a candidate to a simulated fleet and to a configuration of the live system.

Both have the same sizes, so that predictions hold for the configuration. A search uses more slots
than any candidate needs; a configuration has the fewest that reach the predicted rate (`sized`)."""

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
# Number of layer groups of a hand-off; all but the last are transferred while the chunk computes.
LAYER_GROUPS = 4
MOST_SLOTS = 512


@dataclass(frozen=True)
class FleetMaker:
    """Makes fleets and configurations of candidates.

    Attributes:
      fused: Whether one-pool modes run a prefill chunk and a decode step as one step, as in
        Sarathi-Serve, instead of alternately as in this engine.
      reuse: Whether workers use a prefix cache.
      hardware: Name of the accelerator in a written configuration.
      slots: Maximum number of sequences that decode on a dp rank at once.
      weights: Quantization of the weights of `geometry`; empty for none.
    """

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
        """Returns a maker with the fewest slots for which `holds` confirms the finding in
        simulation. The number is a power of two and at least 1.5 times a rank's mean number of
        decoding sequences."""
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
        """Simulates a candidate on arrivals until `lost` reports a lost goal; implements the
        planner's `Runner`."""
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
        """Returns the configuration for `jdisagg serve` or `cluster`, with one instance per
        role."""
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
