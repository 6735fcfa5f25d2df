"""The cases of the study: models with their hardware, workloads with their limits, and the
candidates of each mode.

The candidates are the planner's: for each mode the best ones by stepping the cost model, under
each of the limits. Chunked prefill is estimated as in engines that run a chunk and a decode step as
one program (`fused`), because this is the strongest alternative. It is searched like two pools:
under each of the limits the best layouts, including wide expert parallelism, each with its best
chunk size. Everything else is the same engine for all modes."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from jdisagg.config import Mode
from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import accelerator
from jdisagg.simulator.planning.bounds import Goal
from jdisagg.simulator.planning.candidates import Candidate, Site
from jdisagg.simulator.planning.fleet import FleetMaker
from jdisagg.simulator.planning.planner import Planner
from jdisagg.simulator.report import SloLimits
from jdisagg.simulator.trace_files import read_trace
from jdisagg.simulator.workloads import Arrival, within_context

DATA = Path(__file__).parent / "data"
SEARCHED = ("usual", "tight")
# Of each mode, layouts under each of these limits.
MOST_LAYOUTS = 2


@dataclass(frozen=True)
class Limits:
    """One SLO of the study. `longest_gap` bounds every gap between tokens, including the
    hand-off's."""

    name: str
    ttft: float
    tpot: float
    longest_gap: float | None = None

    @property
    def slo(self) -> SloLimits:
        return SloLimits(self.ttft, self.tpot, self.longest_gap)

    @property
    def goal(self) -> Goal:
        return Goal(self.ttft, self.tpot)


SHORT = (Limits("tight", 0.5, 0.03), Limits("usual", 1.0, 0.05), Limits("smooth", 1.0, 0.05, 0.2))
LONG = (Limits("tight", 5.0, 0.03), Limits("usual", 10.0, 0.05), Limits("smooth", 10.0, 0.05, 0.2))


@dataclass(frozen=True)
class Workload:
    """Every n-th request of a published trace, in order (`data/README.md`). With `lengths` instead
    of a file, all requests have the same prompt and output lengths."""

    name: str
    file: str
    limits: tuple[Limits, ...]
    lengths: tuple[int, int] | None = None

    @property
    def arrivals(self) -> list[Arrival]:
        """Returns the requests. Their times do not matter, because each run has its own rate. Their
        block names do not matter, because there is no prefix cache, so requests may be repeated."""
        if self.lengths:
            return [Arrival(0.0, *self.lengths)]
        return [replace(arrival, block_hashes=()) for arrival in read_trace(DATA / self.file)]


WORKLOADS = (
    Workload("azure-conversation", "azure2023_conv_slice.csv.gz", SHORT),
    Workload("azure-code", "azure2023_code_slice.csv.gz", SHORT),
    Workload("mooncake", "mooncake_conversation_slice.csv.gz", LONG),
)
# What a vendor reports of a MoE of about 200B parameters, one pool against two.
ALIKE = Workload("6K prompts, 512 outputs", "", SHORT, (6144, 512))


DATA_SHEET_BYTES = {"h100": 80e9}


@dataclass(frozen=True)
class Setting:
    """`requests`: largest number of requests of one run; a run may need fewer."""

    name: str
    model: str
    hardware: str
    accelerators: int
    requests: int

    @property
    def site(self) -> Site:
        """Returns the site with the memory of data sheets, with which the committed results were
        computed."""
        card = accelerator(self.hardware)
        memory = DATA_SHEET_BYTES.get(self.hardware, card.memory_bytes)
        return Site(replace(card, memory_bytes=memory), self.accelerators)


SETTINGS = (
    # The 3.1 has the sizes of the 3 and the context that Mooncake's prompts need.
    Setting("llama-3-70b on 16 h100", "llama-3.1-70b", "h100", 16, 3000),
    Setting("qwen3-235b-a22b on 32 of a gb200-nvl72", "qwen3-235b-a22b", "gb200-nvl72", 32, 12000),
)


@dataclass(frozen=True)
class StudyCase:
    setting: Setting
    workload: Workload

    @property
    def name(self) -> str:
        return f"{self.setting.name} / {self.workload.name}"

    @cached_property
    def maker(self) -> FleetMaker:
        return FleetMaker(geometry(self.setting.model), self.setting.site, fused=True)

    @cached_property
    def arrivals(self) -> list[Arrival]:
        return within_context(self.workload.arrivals, geometry(self.setting.model).context_tokens)

    @cached_property
    def candidates(self) -> dict[Candidate, dict[str, float]]:
        """With the stepped rates (requests per second of all) under those of the limits that are
        searched in which a candidate comes near the best of its mode."""
        goals = {limits.name: limits.goal for limits in self.workload.limits}
        chosen: dict[Candidate, dict[str, float]] = {}
        for name in SEARCHED:
            shape, site = geometry(self.setting.model), self.setting.site
            planner = Planner(shape, site, goals[name], self.maker.runners)
            ranked = [(item.candidate, item.rate) for item in planner.stepped(self.arrivals)]
            of = {mode: [item for item in ranked if item[0].mode is mode] for mode in Mode}
            chunked = {item[0].decode: item for item in reversed(of[Mode.CHUNKED])}
            best = [item for item in of[Mode.CHUNKED] if chunked[item[0].decode] is item]
            two = of[Mode.DISAGGREGATED][: 2 if name == "usual" else 1]
            for candidate, rate in [*best[:MOST_LAYOUTS], of[Mode.UNIFIED][0], *two]:
                chosen.setdefault(candidate, {})[name] = rate
        return chosen


CASES = (
    *(StudyCase(setting, workload) for setting in SETTINGS for workload in WORKLOADS),
    StudyCase(SETTINGS[1], ALIKE),
)
