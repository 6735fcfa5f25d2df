"""Builds workloads from flags, checks output files, and summarises failed requests."""

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from jdisagg.errors import ConfigError
from jdisagg.simulator.conversations import ConversationTurns, conversations
from jdisagg.simulator.report import RequestOutcome, SloLimits
from jdisagg.simulator.trace_files import read_trace
from jdisagg.simulator.workloads import Arrival, Fixed, at_rate, faster, gamma, spread_ticks
from launch.flags import Given

TWICE = "--speed={:g} and --rate={:g} both set the rate; give one of them"


def slo_limits(flags: Given) -> SloLimits | None:
    given = flags.ttft is not None or flags.tpot is not None
    return SloLimits(flags.ttft, flags.tpot) if given else None


def arrivals_of(flags: Given, context_tokens: int | None = None) -> list[Arrival]:
    """Returns the arrivals of a simulation: of a trace, of conversations, or random ones.

    Conversations end before they exceed `context_tokens` tokens. Raises ConfigError or
    WorkloadError for invalid flags or combinations of flags."""
    if flags.rate is not None and flags.speed is not None:
        raise ConfigError(TWICE.format(flags.speed, flags.rate))
    for name in ("speed", "spread_tick_seconds"):
        value = getattr(flags, name)
        if value is not None and flags.trace is None:
            raise ConfigError(f"--{name}={value:g} needs --trace")
    for name in ("turns", "think_seconds", "system_tokens"):
        if flags.present(name) and (flags.trace is not None or flags.turns is None):
            raise ConfigError(f"--{name}={getattr(flags, name)} needs --turns and no --trace")
    for name in ("rate", "speed", "variation", "spread_tick_seconds", "turns"):
        if flags.concurrency is not None and flags.present(name):
            raise ConfigError(
                f"--{name}={getattr(flags, name)} and --concurrency={flags.concurrency} both"
                " determine when requests arrive; give one of them"
            )
    if flags.trace is None:
        lengths = Fixed(flags.prompt_tokens, flags.output_tokens)
        rate = 1.0 if flags.rate is None else flags.rate
        count = flags.requests or 1000
        if flags.turns is None:
            return gamma(rate, count, lengths, flags.variation, flags.seed)
        turns = ConversationTurns(
            flags.turns,
            flags.think_seconds,
            flags.system_tokens,
            flags.block_tokens,
            context_tokens,
        )
        return conversations(rate, count, lengths, turns, flags.seed)
    arrivals = traced(flags, flags.requests)
    return faster(arrivals, flags.speed) if flags.rate is None and flags.speed else arrivals


def traced(flags: Given, limit: int | None) -> list[Arrival]:
    arrivals = read_trace(flags.trace, limit)
    if flags.spread_tick_seconds is not None:
        arrivals = spread_ticks(arrivals, flags.spread_tick_seconds, flags.seed)
    return arrivals if flags.rate is None else at_rate(arrivals, flags.rate)


def check_output(path: str | None, kind: str) -> None:
    """Checks before a run that its output can be written. Raises ConfigError if the file `path`
    cannot be written or does not end in `kind`, e.g. ".json". Accepts an empty path."""
    if not path:
        return
    folder = Path(path).resolve().parent
    if Path(path).suffix != kind or not folder.is_dir():
        raise ConfigError(
            f"{path} cannot be written after the run: it must end in {kind}, in a folder that"
            " exists"
        )
    if not (
        os.access(path, os.W_OK) and Path(path).is_file()
        if Path(path).exists()
        else os.access(folder, os.W_OK | os.X_OK)
    ):
        raise ConfigError(
            f"{path} cannot be written after the run: it must be a file, and one that you may"
            " write; choose another"
        )


def reasons(outcomes: Iterable[RequestOutcome], most: int = 3) -> list[str]:
    found = Counter(
        f"{item.end}: {item.reason}" for item in outcomes if item.end != "finished" and item.reason
    )
    return [f"{count} x {reason}" for reason, count in found.most_common(most)]
