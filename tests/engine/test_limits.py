"""How many layer groups a model gets: by its bytes, alike on both sides of a hand-off, unless
somebody says otherwise."""

from dataclasses import replace

import pytest

from jdisagg.config import InstanceConfig, Mode
from jdisagg.engine.limits import groups_of_layers, hands_windows_apart, mesh_limits
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KVComponent, KVLayer, KVSpec

LLAMA_8B = KVSpec.attention(32, 8, 128, "bfloat16")
TINY = KVSpec.attention(4, 2, 16, "float32")


def test_deep_models_get_many_groups_and_small_ones_few() -> None:
    for spec, asked, groups in (
        (LLAMA_8B, None, 16),
        (KVSpec.attention(94, 4, 128, "bfloat16"), None, 23),
        (KVSpec.attention(2, 64, 256, "float32"), None, 2),
        (TINY, None, 1),
        (TINY, 3, 3),
        (TINY, 9, 4),
        (LLAMA_8B, 2, 2),
    ):
        assert groups_of_layers(spec, asked) == groups, (spec, asked)


def test_pages_smaller_than_a_tile_are_refused_on_a_tpu() -> None:
    how = (Mode.DISAGGREGATED, LLAMA_8B, 1024, None)
    with pytest.raises(ConfigError, match="page_size=16 must be at least 32 on a TPU"):
        mesh_limits(InstanceConfig(page_size=16), *how, "tpu")
    for platform in ("cpu", "gpu"):
        assert mesh_limits(InstanceConfig(page_size=16), *how, platform).page_size == 16
    assert mesh_limits(InstanceConfig(page_size=32), *how, "tpu").batch_buckets[0] == 8


def test_both_sides_choose_alike_whatever_else_differs() -> None:
    one = InstanceConfig(Layout(tp=2), page_size=64, chunk_tokens=4096)
    other = InstanceConfig(Layout(dp=4), page_size=16, chunk_tokens=256)
    how = (Mode.DISAGGREGATED, LLAMA_8B, 8192, None)
    assert len({mesh_limits(config, *how).layer_groups for config in (one, other)}) == 1


def test_short_prompts_leave_in_blocks_of_four_mebibytes_unless_groups_were_asked_for() -> None:
    for groups, asked, block_bytes, bands in (
        (None, None, 4 << 20, 1),
        (8, None, 0, 8),
        (None, 0, 0, 16),
        (8, 1 << 20, 1 << 20, 2),
        (1, None, 0, 1),
    ):
        config = InstanceConfig(block_bytes=asked)
        limits = mesh_limits(config, Mode.DISAGGREGATED, LLAMA_8B, 8192, groups)
        assert (limits.block_bytes, len(limits.bands(16))) == (block_bytes, bands), (groups, asked)
    with pytest.raises(ConfigError, match="block_bytes must not be negative, got -1"):
        InstanceConfig(block_bytes=-1)


def test_chunks_hold_whole_granules() -> None:
    for smallest, largest in ((8, 512), (24, 512), (20, 80), (64, 72)):
        wrong = InstanceConfig(chunk_tokens=largest, min_chunk_tokens=smallest)
        with pytest.raises(ConfigError, match=r"chunk_tokens=\d+ must be a multiple of 16"):
            mesh_limits(wrong, Mode.DISAGGREGATED, TINY, 512, None)


def test_sizes_are_few_whatever_a_deployment_sets() -> None:
    config = InstanceConfig(
        Layout(), page_size=64, slots_per_rank=128, chunk_tokens=8192, min_chunk_tokens=256
    )
    how = Mode.DISAGGREGATED, LLAMA_8B, 8192, None
    gpu, cpu = mesh_limits(config, *how, "gpu"), mesh_limits(config, *how)
    assert gpu.batch_buckets == (8, 32, 128) and gpu.pair_batches == (128,)
    assert cpu.batch_buckets == (1, 4, 8, 16, 64, 128) and cpu.pair_batches == (1, 128)
    assert gpu.chunk_buckets == cpu.chunk_buckets == (2048, 4096, 8192)
    assert {tokens for _, tokens in gpu.block_shapes()} == {16, 128, 1024}
    few = mesh_limits(replace(config, slots_per_rank=6), *how)
    assert few.batch_buckets == (1, 4, 6) and few.pair_batches == (1, 6)
    assert mesh_limits(replace(config, slots_per_rank=1), *how).pair_batches == (1,)


def test_a_mesh_that_appends_has_small_chunks_of_its_own_beside_those_of_hand_offs() -> None:
    config = InstanceConfig(Layout(), chunk_tokens=512, min_chunk_tokens=64)
    how = Mode.DISAGGREGATED, LLAMA_8B, 8192, None
    plain, appends = mesh_limits(config, *how), mesh_limits(config, *how, append_tokens=256)
    assert appends.chunk_buckets == plain.chunk_buckets and plain.append_buckets == ()
    assert appends.append_buckets == appends.computed_by(False).chunk_buckets == (64, 128, 256)
    assert appends.computed_by(True) is appends, "the chunks of a worker that computes all"
    assert appends.block_shapes() == plain.block_shapes(), "blocks come from the other side"
    assert plain.computed_by(False) is plain
    assert mesh_limits(config, *how, append_tokens=48).append_buckets == (48,)


@pytest.mark.parametrize("window", [1, 7, 8, 9, 128])
@pytest.mark.parametrize("page_size", [1, 8])
def test_a_ring_holds_window_and_page_and_never_writes_over_what_is_seen(
    window: int, page_size: int
) -> None:
    spec = KVSpec.attention(2, 2, 16, "float32", (None, window))
    limits = mesh_limits(
        InstanceConfig(page_size=page_size),
        Mode.DISAGGREGATED,
        spec,
        512,
        None,
        windows_apart=True,
        rings=True,
    )
    in_pages = -(-(window - 1) // page_size) * page_size
    assert limits.ring_pages * page_size == in_pages + page_size
    slot, size = 3, limits.ring_pages
    pages = limits.ring(slot, 512)
    assert set(pages) == set(range(slot * size, (slot + 1) * size))
    for position in range(512):
        first = max(0, position - window + 1)
        assert limits.seen_from(position) == first or window == 1
        seen = pages[first // page_size : position // page_size + 1]
        assert len(set(seen)) == len(seen)


def test_windows_go_apart_only_between_two_meshes() -> None:
    assert hands_windows_apart(True, Mode.DISAGGREGATED)
    assert not hands_windows_apart(False, Mode.DISAGGREGATED)
    assert not hands_windows_apart(True, Mode.CHUNKED)


def test_few_programs_run_chunks_with_steps_and_only_on_one_mesh_without_state() -> None:
    config = InstanceConfig(chunk_tokens=1024, min_chunk_tokens=64, slots_per_rank=64)
    rest = LLAMA_8B, 2048, 1
    for platform in ("cpu", "gpu", "tpu"):
        limits = mesh_limits(replace(config, page_size=32), Mode.CHUNKED, *rest, platform)
        assert limits.mixed_buckets == (256, 512, 1024)
        assert set(limits.mixed_buckets) <= set(limits.chunk_buckets)
    for mode in (Mode.UNIFIED, Mode.DISAGGREGATED):
        assert not mesh_limits(config, mode, *rest).mixed_buckets
    state = KVLayer((), state=(KVComponent("state", 4, 16),))
    with_state = replace(LLAMA_8B, layers=(*LLAMA_8B.layers, state))
    assert not mesh_limits(config, Mode.CHUNKED, with_state, 2048, 1).mixed_buckets
