"""Settings are read from text, and impossible ones are named by their path."""

import enum
import operator
from collections.abc import Iterator

import pytest

from configs import tiny_cpu
from jdisagg.config import (
    EngineConfig,
    InstanceConfig,
    Mode,
    ObserveConfig,
    PrefixConfig,
    ServiceConfig,
)
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.router.elastic import ElasticConfig
from jdisagg.settings.declared import SettingError, Settings, settings_of, texts_of
from tests.set_settings import set_by


def test_fields_are_set_by_path_and_parsed_by_their_type():
    config = set_by(
        tiny_cpu.get_config(),
        [
            "mode=chunked",
            "decode.layout=dp=2,tp=2",
            "decode.pages_per_rank=9",
            "limits.handoff_lease_seconds=4.5",
            "warm_up=false",
        ],
    )
    assert (config.mode, config.decode.layout, config.decode.pages_per_rank) == (
        Mode.CHUNKED,
        Layout(2, 2),
        9,
    )
    assert (config.limits.handoff_lease_seconds, config.warm_up) == (4.5, False)
    assert config.prefill == tiny_cpu.get_config().prefill
    assert set_by(config, ["decode.pages_per_rank=none"]).decode.pages_per_rank is None


@pytest.mark.parametrize("order", [1, -1])
def test_the_order_of_overrides_does_not_matter(order: int):
    both = ["decode.chunk_tokens=64", "decode.min_chunk_tokens=32"][::order]
    start = EngineConfig(decode=InstanceConfig(chunk_tokens=128, min_chunk_tokens=128))
    decode = set_by(start, both).decode
    assert (decode.chunk_tokens, decode.min_chunk_tokens) == (64, 32)


def test_of_two_overrides_of_a_field_the_later_counts():
    assert set_by(EngineConfig(), ["service.port=1", "service.port=2"]).service.port == 2


IMPOSSIBLE = {
    "decode.slots=4": "decode.slots is not a setting; there are layout, page_size",
    "decoder.page_size=4": "decoder is not a setting; did you mean decode?",
    "decode.page_size.x=4": "decode.page_size has no settings of its own",
    "decode=4": "decode is a section, not a value, got '4'; set one of its settings: layout",
    "decode.page_size": "must have the form path.to.setting=value",
    "decode.page_size=many": "decode.page_size must be a whole number, got 'many'",
    "mode=magic": "mode must be one of disaggregated, chunked, unified, got 'magic'",
    "warm_up=perhaps": "warm_up must be true or false, got 'perhaps'",
    "decode.page_size=0": "decode.page_size must be positive, got 0",
    "decode.chunk_tokens=16": "decode.min_chunk_tokens=64 must not exceed chunk_tokens=16; lower",
    "decode.layout=dp2": "decode.layout: .*'dp2' is not one of dp=N",
    "limits.handoff_lease_seconds=2.5": r"must be at least 3, .*handoff.heartbeat_seconds=2",
    "service.port=99999": r"service.port must be in \[0, 65535\], got 99999; 0 lets",
}


def test_a_setting_that_cannot_be_is_named_by_its_path():
    for assignment, message in IMPOSSIBLE.items():
        with pytest.raises(SettingError, match=message):
            set_by(EngineConfig(), [assignment])


def leaves(config: Settings, at: str = "") -> Iterator[tuple[str, object]]:
    for form in settings_of(type(config)):
        value = getattr(config, form.name)
        path = f"{at}{form.name}"
        yield from leaves(value, f"{path}.") if isinstance(value, Settings) else [(path, value)]


@pytest.mark.parametrize("config", [tiny_cpu.get_config(), ElasticConfig(), ObserveConfig()])
def test_the_text_of_every_value_is_read_as_the_value(config: Settings):
    for path, value in leaves(config):
        text = value.value if isinstance(value, enum.Enum) else str(value)
        assert set_by(config, [f"{path}={text}"]) == config, path


def test_every_setting_has_a_text():
    for config in (EngineConfig(), ElasticConfig(), ObserveConfig()):
        for path, _ in leaves(config):
            *sections, name = path.split(".")
            owner = operator.attrgetter(".".join(sections))(config) if sections else config
            assert texts_of(type(owner)).get(name), f"{path} is missing in Attributes:"


SERVICES: list[dict[str, object]] = [
    *({"port": -1}, {"max_message_bytes": 0}, {"drain_seconds": -0.1}),
    *({"drain_seconds": float("nan")}, {"http_port": -1}, {"http_port": 65536}),
    *({"http_port": 8700}, {"http_cors_origins": "chat.example"}),
    *({"http_cors_origins": "https://a.example/page"}, {"http_cors_origins": "*, x"}),
]
PREFIXES: list[tuple[dict[str, object], str]] = [
    ({"disk_dir": "/kv"}, r"disk_dir='/kv' needs disk_gib \(--disk_cache_gib\), got 0.0; set"),
    ({"disk_gib": 1.0}, r"prefix.disk_gib=1.0 needs disk_dir \(--disk_cache_dir\), got ''; set it"),
    ({"disk_gib": -1.0}, "prefix.disk_gib must not be negative"),
    (
        {"disk_dir": "/kv", "disk_gib": 1.0, "host_gib": 0.0},
        r"needs host_gib \(--host_cache_gib\), got 0.0",
    ),
    ({"disk_ttl_hours": 1.0}, "prefix.disk_ttl_hours=1.0 needs disk_gib"),
    ({"disk_ttl_hours": -1.0}, "prefix.disk_ttl_hours must not be negative, got -1"),
    ({"disk_ttl_hours": float("nan")}, "prefix.disk_ttl_hours must be a finite number, got nan"),
    ({"append_tokens": 24}, "prefix.append_tokens must be 0 or a multiple of 16"),
    ({"append_tokens": -16}, "got -16; rows of a chunk"),
    (
        {"append_tokens": 64, "reuse": False, "host_gib": 0.0},
        r"append_tokens=64 needs reuse \(--prefix_cache\), got False",
    ),
    ({"append_tokens": 64, "grid_tokens": 128}, "omit one of the two"),
]


def test_a_service_and_a_prefix_cache_that_cannot_be_are_refused():
    for fields in SERVICES:
        with pytest.raises(ConfigError, match=f"service.{next(iter(fields))}"):
            ServiceConfig(**fields)  # type: ignore[arg-type]
    for fields, message in PREFIXES:
        with pytest.raises(ConfigError, match=message):
            PrefixConfig(**({"reuse": True, "host_gib": 1.0} | fields))  # type: ignore[arg-type]


def test_appending_is_refused_where_one_mesh_computes_all():
    prefix = PrefixConfig(True, append_tokens=64)
    assert EngineConfig(prefix=prefix).prefix.append_tokens == 64
    with pytest.raises(ConfigError, match="omit --append_tokens"):
        EngineConfig(mode=Mode.CHUNKED, prefix=prefix)


def test_a_disk_for_kv_is_refused_where_there_is_no_prefill_worker():
    prefix = PrefixConfig(True, host_gib=1.0, disk_dir="/kv", disk_gib=1.0)
    assert EngineConfig(prefix=prefix).prefix.disk_bytes == 1 << 30
    with pytest.raises(ConfigError, match="omit --disk_cache_dir"):
        EngineConfig(mode=Mode.CHUNKED, prefix=prefix)
    in_memory = PrefixConfig(True, host_gib=1.0)
    assert EngineConfig(mode=Mode.CHUNKED, prefix=in_memory).prefix.host_bytes == 1 << 30
    assert PrefixConfig(False, host_gib=1.0).host_bytes == 0
