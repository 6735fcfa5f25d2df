"""Chooses a mode for the guide, and describes the reasons in sentences.

Stepping the cost model, as the planner does, predicts the highest rate at which each mode meets the
objectives on TTFT and TPOT. Pauses of running streams are not counted. A mode is therefore advised
only if it also meets all objectives for most requests in a simulation. If several modes qualify,
the guide advises the simplest mode whose predicted rate equals the highest within the prediction
error. Has no side effects."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from jdisagg.config import Mode
from jdisagg.costs.hardware import Accelerator, accelerator, link
from jdisagg.guide.facts import smallest_instance
from jdisagg.simulator.planning.bounds import Demand, Goal, RateCeilings
from jdisagg.simulator.planning.candidates import WHOLE_CHUNK, Candidate, Fitting, Site
from jdisagg.simulator.planning.fleet import FleetMaker
from jdisagg.simulator.planning.measure import Measurer, Task
from jdisagg.simulator.planning.verdict import Finding
from jdisagg.simulator.report import SloLimits
from jdisagg.simulator.workloads import Arrival

ATTAINMENT = 0.9  # fraction of the requests that must meet the objectives
# A gap between two tokens counts as a pause if it exceeds this multiple of the objective per token.
PAUSE_FACTOR = 5.0
LOW_LOAD = 0.3  # fraction of a mode's highest rate
REQUESTS = 400  # of a stepped run
LIMITS = {
    "link ": "the link is full",
    "hand-off": "hand-offs take too long over this link",
    "prefill compute": "prefill is busy all the time",
    "KV memory": "KV memory is full",
    "TTFT": "first tokens come too late",
}


@dataclass(frozen=True, slots=True)
class Objectives:
    """Limits of a request in seconds: time to first token, time per further token, and the longest
    gap between two tokens. The last limit is derived from the time per further token."""

    ttft_seconds: float
    tpot_seconds: float

    @property
    def pause_seconds(self) -> float:
        return PAUSE_FACTOR * self.tpot_seconds

    @property
    def slo(self) -> SloLimits:
        return SloLimits(self.ttft_seconds, self.tpot_seconds, self.pause_seconds)

    @property
    def goal(self) -> Goal:
        return Goal(self.ttft_seconds, self.tpot_seconds, ATTAINMENT)


@dataclass(frozen=True, slots=True)
class Workplace:
    """The accelerators that all modes use: `instances` instances with the layout of `fitting`.
    `between`: name of the link between prefill and decode instances."""

    card: Accelerator
    fitting: Fitting
    instances: int
    between: str

    @classmethod
    def of(cls, model: str, hardware: str, instances: int, between: str) -> "Workplace":
        card = accelerator(hardware)
        return cls(card, smallest_instance(model, card), instances, between)

    @property
    def accelerators(self) -> int:
        return self.instances * self.fitting.layout.devices

    @property
    def site(self) -> Site:
        return Site(self.card, self.accelerators, between=link(self.between))

    def candidates(self, mode: Mode, chunk: int) -> list[Candidate]:
        layout, count = self.fitting.layout, self.instances
        if mode is not Mode.DISAGGREGATED:
            size = chunk if mode is Mode.CHUNKED else WHOLE_CHUNK
            return [Candidate(mode, layout, count, size)]
        return [
            Candidate(mode, layout, count - prefill, WHOLE_CHUNK, layout, prefill)
            for prefill in range(1, count)
        ]

    def candidate(self, advised: "ModeAdvice") -> Candidate:
        mode = Mode(advised.mode)
        found = self.candidates(mode, advised.chunk_tokens)
        return found[max(1, advised.prefill_instances) - 1]


class ModeAdvice(msgspec.Struct, frozen=True):
    """The stepped cost model's prediction for one mode.

    Attributes:
        prefill_instances: Number of prefill instances; 0 if all instances prefill and decode.
        rate: Highest rate of all instances within the objectives on TTFT and TPOT, in requests per
            second.
        limit: The limit that is missed first beyond the rate (`Finding.binding`).
        step_seconds: Predicted decode step of one sequence with a long prompt.
        kv_bytes_per_second, link_bytes_per_second: KV bytes per second that the user's rate
            produces, and that the links can transfer. 0 without a hand-off.
    """

    mode: str
    prefill_instances: int
    decode_instances: int
    chunk_tokens: int
    rate: float
    limit: str
    step_seconds: float
    kv_bytes_per_second: float = 0.0
    link_bytes_per_second: float = 0.0


class GuideAdvice(msgspec.Struct, frozen=True):
    """The mode that the guide advises, with its reasons.

    Attributes:
        mode: The advised mode, or "" if no mode meets the objectives at the rate.
    """

    mode: str
    sentence: str
    modes: tuple[ModeAdvice, ...]


class Simulated(msgspec.Struct, frozen=True):
    """Results of the simulation of one mode.

    Attributes:
        missed: The objectives that each request missed: "ttft", "tpot", "pause".
        longest: Longest gap between two tokens of all requests in seconds, or None without gaps.
    """

    missed: tuple[tuple[str, ...], ...]
    longest: float | None

    @property
    def met(self) -> float:
        return sum(not one for one in self.missed) / len(self.missed)

    def count(self, name: str) -> int:
        return sum(name in one for one in self.missed)


def carried(
    place: Workplace,
    arrivals: Sequence[Arrival],
    rate: float,
    chunk_tokens: int,
    objectives: Objectives,
) -> tuple[ModeAdvice, ...]:
    """Predicts what each mode carries of requests with the lengths of `arrivals`. Of several
    divisions into prefill and decode instances, takes the one with the highest ceiling. Returns the
    simplest mode first. `rate`: requests per second."""
    demand, goal, site = Demand.of(arrivals), objectives.goal, place.site
    ceilings = RateCeilings(site, demand, goal, [place.fitting])
    runner = FleetMaker(place.fitting.model.geometry, site).runners.stepped
    measurer = Measurer(goal, arrivals, demand, site.accelerators, runner, REQUESTS)
    modes = []
    for mode in (Mode.UNIFIED, Mode.CHUNKED, Mode.DISAGGREGATED):
        listed = [(item, ceilings.bounds(item)) for item in place.candidates(mode, chunk_tokens)]
        best, bounds = max(listed, key=lambda pair: pair[1].rate)
        found = measurer.measured(Task(best, bounds, place.fitting.kv_tokens))
        assert found is not None, "a task without a rival has a finding"
        modes.append(_advised(place, found, int(demand.prompts.max()), rate))
    return tuple(modes)


def _advised(place: Workplace, found: Finding, longest: int, rate: float) -> ModeAdvice:
    model, best, reached = place.fitting.model, found.candidate, link(place.between)
    both = min(best.prefill_instances, best.decode_instances) * model.layout.dp
    link_speed = reached.bytes_per_second * reached.efficiency * model.layout.tp * both
    return ModeAdvice(
        mode=best.mode.value,
        prefill_instances=best.prefill_instances,
        decode_instances=best.decode_instances,
        chunk_tokens=best.chunk_tokens,
        rate=found.rate,
        limit=found.binding,
        step_seconds=model.decode([longest]).seconds,
        kv_bytes_per_second=found.bounds.link_share * rate * link_speed,
        link_bytes_per_second=link_speed,
    )


def advice(
    place: Workplace,
    found: Sequence[tuple[ModeAdvice, Simulated]],
    rate: float,
    objectives: Objectives,
) -> GuideAdvice:
    """`found`: for each mode, the cost model's prediction and the simulation's results, simplest
    mode first."""
    modes = tuple(mode for mode, _ in found)
    holding = [mode for mode, seen in found if mode.rate >= rate and seen.met >= ATTAINMENT]
    if not holding:
        return GuideAdvice("", _none(place, found, rate, objectives), modes)
    most = max(item.rate for item in holding)
    error = place.site.software.engine.step_error
    low = len(holding) == len(modes) and rate < LOW_LOAD * min(item.rate for item in holding)
    enough = 0.0 if low else most * (1 - error)
    one = next(item for item in holding if item.rate >= enough)
    reasons = "; ".join(
        _against(mode, seen, one, rate, objectives, error)
        for mode, seen in found
        if mode is not one
    )
    sentence = f"{_name(one)} carries up to {one.rate:.3g} requests/s within the objectives."
    if low:
        sentence += " The load is low, so every mode meets them: take the simplest."
    return GuideAdvice(one.mode, _upper(f"{sentence} {_upper(reasons)}."), modes)


def _none(
    place: Workplace,
    found: Sequence[tuple[ModeAdvice, Simulated]],
    rate: float,
    objectives: Objectives,
) -> str:
    best = max((mode for mode, _ in found), key=lambda item: item.rate)
    if not best.rate:
        limits = "; ".join(f"{_name(mode)}: {_limit(mode)}" for mode, _ in found)
        return (
            f"No mode meets the objectives at any rate ({limits}). Relax the objectives, or choose"
            " faster accelerators or more of them an instance."
        )
    if best.rate < rate:
        needed = math.ceil(place.accelerators * rate / best.rate)
        return (
            f"No mode carries {rate:g} requests/s within the objectives on"
            f" {place.accelerators} accelerators. {_upper(_name(best))} comes nearest with"
            f" {best.rate:.3g} requests/s ({_limit(best)}); about {needed} accelerators are needed."
        )
    error = place.site.software.engine.step_error
    reasons = (_against(mode, seen, best, rate, objectives, error) for mode, seen in found)
    return f"No mode meets all objectives. {_upper('; '.join(reasons))}."


def _against(
    mode: ModeAdvice,
    seen: Simulated,
    best: ModeAdvice,
    rate: float,
    objectives: Objectives,
    error: float,
) -> str:
    if mode.rate < rate:
        return f"{_name(mode)} carries {mode.rate:.3g} requests/s, because {_limit(mode)}"
    if seen.met < ATTAINMENT:
        worst = max(("ttft", "tpot", "pause"), key=seen.count)
        text = {
            "ttft": f"wait longer than {_time(objectives.ttft_seconds)} for their first token",
            "tpot": f"take more than {_time(objectives.tpot_seconds)} per token",
            "pause": f"pause for more than {_time(objectives.pause_seconds)}",
        }[worst]
        return f"with {_name(mode)}, {seen.count(worst) / len(seen.missed):.0%} of requests {text}"
    if mode.rate < best.rate * (1 - error):
        return f"{_name(mode)} carries {mode.rate:.3g} requests/s"
    return (
        f"{_name(mode)} carries {mode.rate:.3g} requests/s, which is within the predictions' error"
        f" of {error:.0%}"
    )


def verdict_of(mode: ModeAdvice, seen: Simulated, objectives: Objectives) -> str:
    total, kept = len(seen.missed), sum(not one for one in seen.missed)
    said = [f"{kept} of {total} requests meet all objectives."]
    if mode.link_bytes_per_second and mode.kv_bytes_per_second >= mode.link_bytes_per_second:
        said.append(
            f"The prompts bring {mode.kv_bytes_per_second / 1e9:.2g} GB/s of KV and the link"
            f" carries {mode.link_bytes_per_second / 1e9:.2g} GB/s: it is full."
        )
    longest = _time(seen.longest or 0.0)
    if pauses := seen.count("pause"):
        cause = {
            Mode.UNIFIED.value: "while prompts are prefilled",
            Mode.CHUNKED.value: "in steps with a chunk of a prompt",
            Mode.DISAGGREGATED.value: "while their KV is handed off",
        }[mode.mode]
        allowed = _time(objectives.pause_seconds)
        said.append(f"{pauses} pause for more than {allowed}, up to {longest}, mostly {cause}.")
    else:
        said.append(f"No stream pauses for more than {longest}.")
    if late := seen.count("ttft"):
        said.append(
            f"{late} wait longer than {_time(objectives.ttft_seconds)} for their first token."
        )
    if slow := seen.count("tpot"):
        said.append(
            f"{slow} take more than {_time(objectives.tpot_seconds)} per token; a decode step of"
            f" one sequence takes {_time(mode.step_seconds)}."
        )
    return " ".join(said)


def _name(item: ModeAdvice) -> str:
    if item.prefill_instances:
        return f"disaggregated ({item.prefill_instances} prefill, {item.decode_instances} decode)"
    return f"chunked ({item.chunk_tokens:,})" if item.mode == Mode.CHUNKED.value else item.mode


def _limit(item: ModeAdvice) -> str:
    if item.limit == "TPOT":
        return f"tokens come too slowly (a decode step of one takes {_time(item.step_seconds)})"
    return next((said for name, said in LIMITS.items() if name in item.limit), item.limit)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
