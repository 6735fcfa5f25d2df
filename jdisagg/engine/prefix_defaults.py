"""Chooses the settings of the prefix cache that the user did not set. By default all tiers except
the disk are on."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from jdisagg.config import EngineConfig, InstanceConfig, Mode, PrefixConfig, WorkerConfig
from jdisagg.engine.host_memory import free_host_memory
from jdisagg.engine.limits import repeatable_drafts, shared_drafts
from jdisagg.errors import ConfigError
from jdisagg.messages.worker_status import WorkerRole

Config = TypeVar("Config", EngineConfig, WorkerConfig)
Fitted = TypeVar("Fitted")

# Share of the free host memory that all workers of a host may fill with KV.
HOST_SHARE = 0.2
LEAST_HOST_GIB = 1 / 16  # a smaller share holds too few blocks to be useful
# Two blocks: the incomplete block at the end of the last turn, and the tokens of the new turn.
APPEND_TOKENS = 256


def with_defaults(
    prefix: PrefixConfig, mode: Mode, *, priced: bool = True, host_bytes: int = 0
) -> PrefixConfig:
    """Returns the settings of the prefix cache with a default in place of each None.

    Args:
        mode: Mode of the cluster, or DISAGGREGATED for a worker of one role.
        priced: Whether the router predicts times. It can then compare a prefill of new tokens on
            the decode worker (appending) with a hand-off from a prefill worker.
    """
    reuse = prefix.reuse is not False
    appends = reuse and priced and mode is Mode.DISAGGREGATED and prefix.grid_tokens is None
    gib = round(host_bytes / (1 << 30), 2)
    return replace(
        prefix,
        reuse=reuse,
        host_gib=(gib if gib >= LEAST_HOST_GIB else 0.0)
        if prefix.host_gib is None
        else prefix.host_gib,
        peer_fetch=reuse if prefix.peer_fetch is None else prefix.peer_fetch,
        append_tokens=(APPEND_TOKENS if appends else 0)
        if prefix.append_tokens is None
        else prefix.append_tokens,
    )


def engine_defaults(config: EngineConfig, room_bytes: int | None = None) -> EngineConfig:
    sides = (config.prefill, config.decode)
    two = config.mode is Mode.DISAGGREGATED
    prefix = with_defaults(
        replace(config.prefix, peer_fetch=bool(config.prefix.peer_fetch)),
        config.mode,
        priced=_priced(config.warm_up, *sides),
        host_bytes=_share(room_bytes) // (2 if two else 1),
    )
    prefill, decode = (
        replace(side, speculate=shared_drafts(config, side.speculate)) for side in sides
    )
    return replace(config, prefix=prefix, prefill=prefill, decode=decode)


def worker_defaults(
    config: WorkerConfig,
    role: WorkerRole,
    sharers: int,
    processes: int,
    room_bytes: int | None = None,
) -> WorkerConfig:
    """Returns the configuration of a worker with defaults for the unset settings of the prefix
    cache.

    Args:
        sharers: Number of workers on this host, including this one.
    """
    alone = processes == 1
    prefix = with_defaults(
        config.prefix,
        config.mode if role is WorkerRole.MIXED else Mode.DISAGGREGATED,
        priced=alone and _priced(config.warm_up, config.instance),
        host_bytes=_share(room_bytes) // sharers if alone else 0,
    )
    if not alone and config.prefix.peer_fetch is None:
        prefix = replace(prefix, peer_fetch=False)
    drafts = repeatable_drafts(prefix, config.instance.speculate)
    return replace(config, prefix=prefix, instance=replace(config.instance, speculate=drafts))


def fit_with_defaults(
    config: Config, given: PrefixConfig, fit: Callable[[Config], Fitted]
) -> Fitted:
    """Calls `fit`, which raises ConfigError if `config` does not fit into device memory. If so,
    calls `fit` again without the defaults that need device memory. It first omits copies to host
    memory, fetches and appending, and then reuse, which needs memory for snapshots of recurrent
    state."""
    prefix, fetches = config.prefix, given.peer_fetch
    smaller = replace(
        prefix,
        host_gib=0.0 if given.host_gib is None and not prefix.disk_gib else prefix.host_gib,
        peer_fetch=False if fetches is None else prefix.peer_fetch,
        append_tokens=0 if given.append_tokens is None else prefix.append_tokens,
    )
    needs = smaller.host_bytes or smaller.events or smaller.appends or smaller.peer_fetch
    off = smaller if given.reuse or needs else replace(smaller, reuse=False)
    for tried in (prefix, smaller):
        if tried != off:
            try:
                return fit(replace(config, prefix=tried))
            except ConfigError:
                continue
    return fit(replace(config, prefix=off))


def _priced(warm_up: bool, *instances: InstanceConfig) -> bool:
    return warm_up or all(instance.hardware for instance in instances)


def _share(room_bytes: int | None) -> int:
    share = int(free_host_memory() * HOST_SHARE)
    return share if room_bytes is None else min(share, room_bytes)
