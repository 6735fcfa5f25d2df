"""Builds the fleet for `jdisagg simulate`, its settings and the elastic controller from flags."""

import sys
from dataclasses import dataclass, replace

from jdisagg.config import LimitsConfig, Mode, PrefixConfig, RoutingConfig
from jdisagg.costs.hardware import link
from jdisagg.engine.prefix_defaults import HOST_SHARE, with_defaults
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.node.hardware_files import find_accelerator
from jdisagg.router.elastic import ElasticConfig
from jdisagg.settings.declared import Settings, assignment, changed
from jdisagg.simulator.elastic import elastic
from jdisagg.simulator.fleet import INSTANCE, LIMITS, Fleet, Pool
from jdisagg.simulator.report import SloLimits
from jdisagg.simulator.run import Hook
from launch.cost_inputs import find_geometry, software_of
from launch.flags import Given

# Host memory per accelerator of a simulated host: 2 TB for eight, as in an HGX.
HOST_BYTES_OF_DEVICE = 250e9


@dataclass(frozen=True)
class SimulationSettings(Settings):
    """The parts of a simulation's configuration that --set can change."""

    limits: LimitsConfig = LIMITS
    routing: RoutingConfig = RoutingConfig()
    elastic: ElasticConfig = ElasticConfig()
    prefix: PrefixConfig = PrefixConfig()


def simulated_fleet(flags: Given) -> Fleet:
    mode = Mode(flags.mode)
    if mode is not Mode.DISAGGREGATED and flags.present("prefill_workers"):
        raise ConfigError(
            f"--prefill_workers={flags.prefill_workers} has no effect in mode {mode.value}, whose"
            " only pool is set by --decode_workers"
        )
    chunk = (
        (2048 if mode is Mode.CHUNKED else INSTANCE.chunk_tokens)
        if flags.chunk_tokens is None
        else flags.chunk_tokens
    )
    instance = replace(
        INSTANCE, slots_per_rank=flags.slots_per_rank, chunk_tokens=chunk, codec=flags.codec
    )
    first = find_accelerator(flags.prefill_hardware)
    second = find_accelerator(flags.decode_hardware) if flags.decode_hardware else first
    prefill = replace(instance, layout=Layout.parse(flags.prefill))
    decode = replace(instance, layout=Layout.parse(flags.decode or flags.prefill))
    settings = changed(SimulationSettings(), map(assignment, flags.set))
    software = software_of(flags)
    geometry = find_geometry(flags.model, flags.kv_dtype, software, flags.draft)
    decoding = Pool(flags.decode_workers, second, decode)
    two = mode is Mode.DISAGGREGATED
    prefilling = Pool(flags.prefill_workers, first, prefill) if two else None
    kept = _prefix(settings.prefix, flags, prefilling or decoding, mode)
    fetches = settings.routing.peer_fetch
    return Fleet(
        geometry,
        decoding,
        prefilling,
        mode,
        limits=settings.limits,
        routing=replace(
            settings.routing, peer_fetch=kept.peer_fetch if fetches is None else fetches
        ),
        dtype=flags.dtype,
        host_devices=flags.host_devices,
        link=link(flags.link) if flags.link else None,
        fused=flags.fused,
        prefix=kept,
        block_tokens=flags.block_tokens,
        software=software,
    )


def _prefix(settings: PrefixConfig, flags: Given, pool: Pool, mode: Mode) -> PrefixConfig:
    names = {
        "prefix_cache": "reuse",
        "host_cache_gib": "host_gib",
        "append_tokens": "append_tokens",
    }
    given = {field: getattr(flags, name) for name, field in names.items() if flags.present(name)}
    return with_defaults(
        replace(settings, **given),
        mode,
        host_bytes=int(HOST_SHARE * HOST_BYTES_OF_DEVICE * pool.devices),
    )


def controllers(flags: Given, slo: SloLimits | None) -> list[Hook]:
    if not flags.elastic:
        return []
    config = changed(SimulationSettings(), map(assignment, flags.set)).elastic
    if slo is not None:
        wanted = {"ttft_seconds": slo.ttft_seconds, "tpot_seconds": slo.tpot_seconds}
        given = {name: value for name, value in wanted.items() if value is not None}
        config = replace(config, slo=replace(config.slo, **given))

    def say(now: float, text: str) -> None:
        print(f"{now:.0f} s: {text}", file=sys.stderr)

    return [elastic(config, flags.switch_seconds, say)]
