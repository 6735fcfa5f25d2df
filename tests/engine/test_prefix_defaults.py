"""Settings of the prefix cache that a user leaves open, and that what a user sets stays."""

from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.config import EngineConfig, InstanceConfig, Mode, PrefixConfig, WorkerConfig
from jdisagg.engine import host_memory, prefix_defaults
from jdisagg.engine.host_memory import free_host_memory
from jdisagg.engine.prefix_defaults import (
    APPEND_TOKENS,
    HOST_SHARE,
    engine_defaults,
    fit_with_defaults,
    with_defaults,
    worker_defaults,
)
from jdisagg.errors import ConfigError
from jdisagg.messages.worker_status import WorkerRole

GIB = 1 << 30
OPEN = PrefixConfig()
BOTH = Mode.DISAGGREGATED


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_defaults, "free_host_memory", lambda: 100 * GIB)


def test_everything_but_the_disk_is_on_and_what_the_user_sets_stays() -> None:
    made = with_defaults(OPEN, BOTH, host_bytes=3 * GIB)
    assert (made.reuse, made.host_gib, made.peer_fetch) == (True, 3.0, True)
    assert made.append_tokens == APPEND_TOKENS
    given = PrefixConfig(reuse=True, host_gib=0.0, peer_fetch=False, append_tokens=0)
    assert with_defaults(given, BOTH, host_bytes=GIB) == given
    off = with_defaults(PrefixConfig(reuse=False), BOTH, host_bytes=GIB)
    assert (off.reuse, off.peer_fetch, off.append_tokens) == (False, False, 0)


def test_decode_workers_append_only_beside_prefill_workers_with_prices_and_without_a_grid() -> None:
    grid = PrefixConfig(grid_tokens=512)
    for prefix, mode, priced in (
        (OPEN, Mode.CHUNKED, True),
        (OPEN, BOTH, False),
        (grid, BOTH, True),
    ):
        made = with_defaults(prefix, mode, priced=priced)
        assert made.reuse and made.append_tokens == 0, (prefix, mode, priced)


def test_a_share_of_the_free_memory_is_divided_among_the_workers_of_a_host() -> None:
    engine = engine_defaults(EngineConfig())
    assert engine.prefix.host_bytes == pytest.approx(HOST_SHARE * 50 * GIB, rel=1e-2)
    assert engine.prefix.peer_fetch is False
    one = engine_defaults(EngineConfig(mode=Mode.CHUNKED))
    assert one.prefix.host_bytes == pytest.approx(HOST_SHARE * 100 * GIB, rel=1e-2)
    role = WorkerRole.PREFILL
    worker = worker_defaults(WorkerConfig(), role, sharers=4, processes=1).prefix
    assert worker.host_bytes == pytest.approx(HOST_SHARE * 25 * GIB, rel=1e-2)
    assert worker.peer_fetch and worker.append_tokens == APPEND_TOKENS
    tight = worker_defaults(WorkerConfig(), role, 4, 1, room_bytes=2 * GIB).prefix
    assert tight.host_bytes == GIB // 2, "devices need the rest"
    several = worker_defaults(WorkerConfig(), role, sharers=4, processes=2).prefix
    assert several.reuse
    assert (several.host_gib, several.peer_fetch, several.append_tokens) == (0.0, False, 0)


def test_without_measured_or_given_prices_nothing_is_appended() -> None:
    cold = EngineConfig(warm_up=False)
    assert engine_defaults(cold).prefix.append_tokens == 0
    given = InstanceConfig(hardware="h100")
    priced = replace(cold, prefill=given, decode=given)
    assert engine_defaults(priced).prefix.append_tokens == APPEND_TOKENS


def test_where_repeated_requests_have_the_same_bits_nothing_is_drafted_unless_asked() -> None:
    grid = PrefixConfig(grid_tokens=512)
    for asked, drafts in (("auto", "off"), ("ngram", "ngram"), ("mtp", "mtp")):
        side = InstanceConfig(speculate=asked)
        engine = engine_defaults(EngineConfig(prefill=side, decode=side, prefix=grid))
        assert (engine.prefill.speculate, engine.decode.speculate) == (drafts, drafts)
        worker = worker_defaults(WorkerConfig(instance=side, prefix=grid), WorkerRole.DECODE, 1, 1)
        assert worker.instance.speculate == drafts
        assert engine_defaults(EngineConfig(decode=side)).decode.speculate == asked


def test_defaults_that_take_device_memory_are_left_out_where_they_do_not_fit() -> None:
    tried: list[PrefixConfig] = []

    def fit(config: WorkerConfig) -> PrefixConfig:
        tried.append(config.prefix)
        if config.prefix.host_bytes or config.prefix.peer_fetch:
            raise ConfigError("it does not fit")
        return config.prefix

    config = worker_defaults(WorkerConfig(), WorkerRole.DECODE, 1, 1)
    kept = fit_with_defaults(config, OPEN, fit)
    assert kept.reuse and (kept.host_gib, kept.append_tokens) == (0.0, 0) and len(tried) == 2

    def fit_alone(config: WorkerConfig) -> PrefixConfig:
        if config.prefix.reuse:
            raise ConfigError("snapshots do not fit")
        return config.prefix

    assert fit_with_defaults(config, OPEN, fit_alone).reuse is False
    with pytest.raises(ConfigError, match="snapshots"):
        fit_with_defaults(config, PrefixConfig(reuse=True), fit_alone)
    asked = PrefixConfig(host_gib=1.0)
    config = worker_defaults(WorkerConfig(prefix=asked), WorkerRole.DECODE, 1, 1)
    with pytest.raises(ConfigError, match="does not fit"):
        fit_with_defaults(config, asked, fit)


def test_a_containers_limit_bounds_the_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    assert free_host_memory() == 0, "nothing is known"
    (tmp_path / "meminfo").write_text("MemTotal:  16777216 kB\nMemAvailable:  8388608 kB\n")
    assert free_host_memory() == 8 * GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert free_host_memory() == 8 * GIB
    (tmp_path / "memory.max").write_text(f"{4 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{3 * GIB}\n")
    assert free_host_memory() == GIB
