"""Overrides of a recipe's fields, as `jdisagg serve --set` passes them."""

import pytest

from configs import tiny_cpu
from jdisagg.config import EngineConfig, InstanceConfig, Mode, PrefixConfig, ServiceConfig, override
from jdisagg.errors import ConfigError, LayoutError
from jdisagg.layout.axes import Layout


def test_fields_are_set_by_path_and_parsed_by_their_type():
    config = override(
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
    assert override(config, ["decode.pages_per_rank=none"]).decode.pages_per_rank is None


@pytest.mark.parametrize("order", [1, -1])
def test_the_order_of_overrides_does_not_matter(order: int):
    both = ["decode.chunk_tokens=64", "decode.min_chunk_tokens=32"][::order]
    start = EngineConfig(decode=InstanceConfig(chunk_tokens=128, min_chunk_tokens=128))
    decode = override(start, both).decode
    assert (decode.chunk_tokens, decode.min_chunk_tokens) == (64, 32)


def test_of_two_overrides_of_a_field_the_later_counts():
    assert override(EngineConfig(), ["service.port=1", "service.port=2"]).service.port == 2


IMPOSSIBLE = {
    "decode.slots=4": "InstanceConfig has no field 'slots'; it has layout, page_size",
    "decoder.page_size=4": "EngineConfig has no field 'decoder'",
    "decode.page_size.x=4": "'decode.page_size.x': int has no fields",
    "decode=4": "InstanceConfig is not a single value; set one of its fields: layout",
    "decode.page_size": "must have the form path.to.field=value",
    "decode.page_size=many": "'many' is not a int",
    "mode=magic": "'magic' is not a Mode: one of disaggregated, chunked, unified",
    "warm_up=perhaps": "'perhaps' is not a bool",
    "decode.page_size=0": "page_size must be positive, got 0",
    "limits.handoff_lease_seconds=2.5": r"must be at least 3, .*handoff.heartbeat_seconds=2",
    "service.port=99999": r"service.port must be in \[0, 65535\], got 99999",
}


def test_an_override_that_cannot_work_is_named():
    for assignment, message in IMPOSSIBLE.items():
        with pytest.raises(ConfigError, match=message):
            override(EngineConfig(), [assignment])


def test_a_layout_that_cannot_be_read_is_a_layout_error():
    with pytest.raises(LayoutError, match="'dp2' is not one of dp=N"):
        override(EngineConfig(), ["decode.layout=dp2"])


SERVICES: list[dict[str, object]] = [
    *({"port": -1}, {"max_message_bytes": 0}, {"drain_seconds": -0.1}),
    *({"drain_seconds": float("nan")}, {"http_port": -1}, {"http_port": 65536}),
    *({"http_port": 8700}, {"http_cors_origins": "chat.example"}),
    *({"http_cors_origins": "https://a.example/page"}, {"http_cors_origins": "*, x"}),
]
PREFIXES: list[tuple[dict[str, object], str]] = [
    ({"disk_dir": "/kv"}, "prefix.disk_dir='/kv' and prefix.disk_gib=0 go together"),
    ({"disk_gib": 1.0}, "prefix.disk_dir='' and prefix.disk_gib=1 go together"),
    ({"disk_gib": -1.0}, "prefix.disk_gib must be 0 or more"),
    ({"disk_dir": "/kv", "disk_gib": 1.0, "host_gib": 0.0}, "remove --host_cache_gib=0"),
    ({"disk_ttl_hours": 1.0}, "prefix.disk_ttl_hours=1 needs the disk tier"),
    ({"disk_ttl_hours": -1.0}, "prefix.disk_ttl_hours must be 0 or more, got -1"),
    ({"disk_ttl_hours": float("nan")}, "prefix.disk_ttl_hours must be 0 or more, got nan"),
    ({"append_tokens": 24}, "prefix.append_tokens must be 0 or a multiple of 16"),
    ({"append_tokens": -16}, "in a chunk, got -16"),
    ({"append_tokens": 64, "reuse": False, "host_gib": 0.0}, "remove --noprefix_cache"),
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
