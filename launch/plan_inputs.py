"""Builds the inputs of the planner from flags: accelerators, modes to compare, and workload."""

import math
from collections.abc import Sequence
from dataclasses import replace

from jdisagg.config import Mode
from jdisagg.costs.engines import Software
from jdisagg.costs.hardware import link
from jdisagg.errors import ConfigError, WorkloadError
from jdisagg.node.hardware_files import find_accelerator
from jdisagg.simulator.planning.candidates import PAGE_TOKENS, Site
from jdisagg.simulator.planning.pools import uses
from jdisagg.simulator.trace_files import read_trace
from jdisagg.simulator.workloads import Arrival, Fixed, Mixture, poisson, within_context
from launch.flags import Given

NAMED_REQUESTS = 20_000
TRACE_BLOCK_TOKENS = 512


def pools_of(flags: Given, software: Software) -> list[Site]:
    """Returns the pools of accelerators of --pool, or the one of --hardware and --accelerators.
    Raises ConfigError for invalid flags."""
    if bool(flags.pool) == bool(flags.hardware):
        raise ConfigError(
            "the accelerators: give either --hardware=NAME with --accelerators, or"
            " --pool=NAME:COUNT@DOLLARS_PER_HOUR for each kind"
        )
    if not flags.pool:
        return [_site(flags, software, flags.hardware, flags.accelerators, flags.dollars_per_hour)]
    for name in ("accelerators", "dollars_per_hour"):
        if flags.present(name):
            raise ConfigError(f"--{name} is part of --pool; leave it out")
    pools = [_site(flags, software, *_pool(text)) for text in flags.pool]
    names = [pool.accelerator.name for pool in pools]
    if len(set(names)) < len(names):
        raise ConfigError(f"--pool: {', '.join(names)} must differ; add up equal accelerators")
    return pools


def sites_of(flags: Given, pools: Sequence[Site], modes: Sequence[Mode]) -> list[Site]:
    """Returns the uses of the pools to plan. Raises ConfigError if --between has no use."""
    if flags.between and len(pools) < 2:
        raise ConfigError("--between is the link between pools, and there is one; leave it out")
    if Mode.DISAGGREGATED not in modes:
        if flags.between:
            raise ConfigError(
                f"--between={flags.between} is the link of a hand-off, and --modes has no"
                " disaggregated; leave one out"
            )
        return list(pools)
    return [*uses(pools, link(flags.between) if flags.between else None)]


def _pool(text: str) -> tuple[str, int, float | None]:
    name, _, size = text.rpartition(":")
    count, _, price = size.partition("@")
    try:
        read = name, int(count), float(price) if price else None
    except ValueError:
        raise ConfigError(
            f"--pool={text} must be NAME:COUNT or NAME:COUNT@DOLLARS_PER_HOUR, such as h100:16@2.5"
        ) from None
    if read[1] < 1:
        raise ConfigError(f"--pool={text} must have a COUNT of at least 1; leave the pool out")
    return read


def _site(flags: Given, software: Software, hardware: str, count: int, price: float | None) -> Site:
    card = find_accelerator(hardware)
    if price is not None:
        card = replace(card, dollars_per_hour=price)
    return Site(
        card,
        count,
        flags.devices_per_node,
        flags.domain_devices,
        link(flags.link) if flags.link else None,
        software,
        hardware=hardware,
    )


def check_choice(flags: Given, rows: int) -> None:
    """Raises ConfigError if --choose is not between 1 and `rows`, the number of rows of the
    planner's table."""
    if flags.output and rows > 0 and not 1 <= flags.choose <= rows:
        raise ConfigError(f"--choose={flags.choose} must be a row of the table, 1 to {rows}")


def defaults_text(flags: Given) -> str:
    unused = ("accelerators",) if flags.pool else ()
    of_trace, of_mixture = ("limit",), ("shared_tokens", "hit_rate")
    return flags.defaults_text((*unused, *(of_mixture if flags.trace else of_trace)))


def modes_of(flags: Given) -> list[Mode]:
    known = {mode.value: mode for mode in Mode}
    if unknown := [name for name in flags.modes if name not in known]:
        raise ConfigError(f"--modes: no mode named {unknown[0]!r}; there are {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(flags.modes)]


def block_tokens(flags: Given) -> int:
    return TRACE_BLOCK_TOKENS if flags.trace else PAGE_TOKENS


def shared_prefixes(
    arrivals: Sequence[Arrival], shared_tokens: int, hit_rate: float
) -> list[Arrival]:
    """Gives the requests a common prefix, so that the planner can predict hits of a prefix cache.
    Returns the requests with the names of the shared prompt blocks.

    Args:
        shared_tokens: Number of tokens at the start of each prompt that are the same in all
            prompts, rounded down to whole blocks. 0 if `hit_rate` is used.

    Raises:
        ConfigError: Both values are given.
    """
    if shared_tokens and hit_rate:
        raise ConfigError("--shared_tokens and --hit_rate exclude each other; leave one out")
    names: dict[int, tuple[int, ...]] = {}
    found: list[Arrival] = []
    for item in arrivals:
        tokens = min(item.prompt_tokens, shared_tokens) or hit_rate * item.prompt_tokens
        count = int(tokens // PAGE_TOKENS)
        named = names.setdefault(count, tuple(range(count)))
        found.append(replace(item, block_hashes=named))
    return found


def planned_workload(flags: Given, context_tokens: int) -> tuple[list[Arrival], int]:
    """Returns the planner's workload from --trace or --mixture, and the number of requests that
    were omitted because they exceed the context. Raises ConfigError or WorkloadError for invalid
    flags."""
    if bool(flags.trace) == bool(flags.mixture):
        raise ConfigError(
            "the workload: give either --trace=FILE or --mixture=weight:prompt/output,..."
        )
    if flags.mixture and flags.present("limit"):
        raise ConfigError(
            "--limit counts the requests of a trace, and --mixture has none; leave it out, or see"
            " --most_requests"
        )
    shared = flags.shared_tokens, flags.hit_rate
    if flags.trace and any(shared):
        raise ConfigError(
            "--shared_tokens and --hit_rate describe a --mixture; a trace has names of its blocks"
        )
    if flags.trace:
        listed = read_trace(flags.trace, flags.limit)
    elif any(shared):  # runs do not repeat requests with named blocks
        drawn = poisson(1.0, NAMED_REQUESTS, mixture(flags.mixture or ()), flags.seed)
        listed = shared_prefixes(drawn, *shared)
    else:
        listed = poisson(1.0, 4000, mixture(flags.mixture or ()), flags.seed)
    kept = within_context(listed, context_tokens)
    return kept, len(listed) - len(kept)


def mixture(parts: Sequence[str]) -> Mixture:
    """Parses a mixture of request lengths. Each part is weight:prompt/output, with lengths in
    tokens. Raises WorkloadError for other text."""
    read: list[tuple[float, Fixed]] = []
    for part in parts:
        try:
            weight, _, lengths = part.partition(":")
            prompt, _, output = lengths.partition("/")
            made = (float(weight), Fixed(int(prompt), int(output)))
        except ValueError:
            raise WorkloadError(
                f"--mixture: {part!r} must have the form weight:prompt/output, such as 0.8:1000/200"
            ) from None
        if not (
            math.isfinite(made[0])
            and made[0] > 0
            and made[1].prompt_tokens > 0
            and made[1].output_tokens > 0
        ):
            raise WorkloadError(f"--mixture: {part!r}: weight, prompt and output must be positive")
        read.append(made)
    return Mixture(tuple(read))
