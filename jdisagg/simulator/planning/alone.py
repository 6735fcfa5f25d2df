"""Goals that no load is low enough for: what one request takes on idle accelerators, by arithmetic.

Nothing is faster than a prompt that is prefilled alone, in one chunk as far as chunks go, or than
decode steps of one sequence. Where the fastest layout leaves fewer requests within a limit than the
goal wants, no candidate attains it at any rate, and no simulation need be asked. Prompts that name
blocks may be cached: of those nothing is said. Pure; knows lengths and cost models."""

from collections.abc import Callable, Sequence

import numpy as np

from jdisagg.costs.cost_model import CostModel
from jdisagg.simulator.planning.bounds import SAMPLE, Demand, Goal, alone_seconds
from jdisagg.simulator.planning.candidates import WHOLE_CHUNK, Fitting, short


def never(fitting: Sequence[Fitting], demand: Demand, goal: Goal, cached: bool) -> str:
    """Why the goal is not attained by a single request on any layout, with the seconds that it
    takes at least; empty where it may be. `cached`: prompts may be known already."""
    wanted = goal.attainment - 1 / SAMPLE  # the sample stands for the workload no closer
    prompts, steps = demand.sample_prompts, demand.sample_outputs - 1
    reasons = []
    if not cached and (found := _missed(fitting, prompts, _first, goal.ttft_seconds, wanted)):
        seconds, layout, tokens = found
        reasons.append(
            f"a prompt of {tokens:,} tokens takes {1e3 * seconds:.3g} ms to its first token on"
            f" {layout}, the fastest layout"
        )
    decoding = prompts[steps > 0]
    part = len(decoding) / len(prompts)
    # Those that never decode keep a limit on decoding.
    needed = 1 - (1 - wanted) / part if part else 0.0
    if part and (found := _missed(fitting, decoding, _step, goal.tpot_seconds, needed)):
        seconds, layout, tokens = found
        reasons.append(
            f"a decode step of one sequence of {tokens:,} tokens takes {1e3 * seconds:.3g} ms on"
            f" {layout}, the fastest layout"
        )
    if not reasons:
        return ""
    return (
        f"nothing fits, because no candidate keeps {goal.attainment:.0%} of requests within TTFT"
        f" {goal.ttft_seconds:g} s and TPOT {goal.tpot_seconds:g} s at any rate: alone on idle"
        f" accelerators {', and '.join(reasons)}; relax that limit, or give faster accelerators"
    )


def _missed(
    fitting: Sequence[Fitting],
    prompts: np.ndarray,
    seconds_of: Callable[[CostModel, int], float],
    limit: float,
    wanted: float,
) -> tuple[float, str, int] | None:
    """(seconds, layout, tokens) of the prompt that should keep the limit and does not on the
    fastest layout; None where enough of them keep it on some layout."""
    at = min(len(prompts) - 1, max(0, int(np.ceil(wanted * len(prompts))) - 1))
    tokens = int(np.sort(prompts)[at])
    # Seconds grow with the length: enough prompts keep the limit if this one does.
    best = min(fitting, key=lambda item: seconds_of(item.model, tokens))
    seconds = seconds_of(best.model, tokens)
    return (seconds, short(best.layout), tokens) if seconds > limit else None


def _first(model: CostModel, tokens: int) -> float:
    return alone_seconds(model, tokens, WHOLE_CHUNK)


def _step(model: CostModel, tokens: int) -> float:
    return model.decode_of(1, tokens).seconds
