"""The memory plan before allocation: sums, reduced contexts and refusals."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from flax import nnx

from jdisagg.config import NO_PREFIX, EngineConfig, InstanceConfig, Mode, ModelConfig, PrefixConfig
from jdisagg.costs.catalog import geometry
from jdisagg.costs.hardware import accelerator
from jdisagg.costs.layout_fit import check_layout
from jdisagg.costs.linear_attention import LinearAttention
from jdisagg.costs.model_geometry import CostGeometry, GroupedAttention
from jdisagg.engine.host_memory import host_memory
from jdisagg.engine.limits import mesh_limits, window_pages
from jdisagg.engine.memory_plan import (
    DeviceMemory,
    MemoryPlan,
    bytes_per_device,
    check_disk_cache,
    check_host_cache,
    device_memory,
    fit_engine,
    fit_instance,
)
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.layout.kv_spec import KVSpec
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.node.recipes import load_recipe
from launch.cost_inputs import find_geometry
from launch.model import as_kept, loader
from launch.shipped import SHIPPED_MODEL

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GOLDEN = Path(__file__).resolve().parents[1] / "golden"
# Shapes of a 1.2B Llama: 32 KiB of KV a token in bfloat16, 2.5 GB of weights.
ONE_B = CostGeometry(
    "one-b",
    width=2048,
    layers=16,
    vocabulary=128_256,
    attention=GroupedAttention(32, 8, 64),
    ffn=8192,
    tied=True,
    context_tokens=131_072,
)
WINDOWED = replace(ONE_B, layers=18, attention=GroupedAttention(32, 8, 64, 1024, 15))
BF16 = ModelConfig(dtype="bfloat16")
SMALL = InstanceConfig(page_size=128, slots_per_rank=16, chunk_tokens=128, min_chunk_tokens=128)


DECODE, PREFILL, MIXED = WorkerRole.DECODE, WorkerRole.PREFILL, WorkerRole.MIXED
TOKEN = 16 * 2 * 8 * 64 * 2  # bytes of KV of a token of ONE_B


def memory(gigabytes: float, platform: str = "cpu") -> DeviceMemory:
    return DeviceMemory(int(gigabytes * 1e9), "a test's", platform)


def fit(
    gigabytes: float,
    role: WorkerRole = DECODE,
    instance: InstanceConfig = SMALL,
    model: ModelConfig = BF16,
    shape: CostGeometry = ONE_B,
    prefix: PrefixConfig = NO_PREFIX,
    platform: str = "cpu",
) -> tuple[InstanceConfig, MemoryPlan]:
    mode = Mode.UNIFIED if role is MIXED else Mode.DISAGGREGATED
    return fit_instance(instance, role, mode, model, shape, memory(gigabytes, platform), prefix)


def test_pages_are_what_is_left_beside_weights_activations_and_staging() -> None:
    instance, plan = fit(10)
    assert plan.weights == pytest.approx(2 * ONE_B.parameters, rel=0.01)
    assert plan.pages == instance.pages_per_rank * 128 * TOKEN  # type: ignore[operator]
    assert plan.total <= plan.memory.bytes < plan.total + 128 * TOKEN
    assert plan.staged >= SMALL.chunk_tokens * TOKEN
    assert plan.context_tokens == 131_072 and plan.tokens_per_rank >= 131_072
    with pytest.raises(ConfigError, match="spread it over more devices"):
        fit(2, MIXED)


def test_memory_for_a_second_copy_of_the_weights_is_kept_free_if_it_is_configured() -> None:
    second = replace(SMALL, stage_weights=True)
    plain, keeping = fit(10)[1], fit(10, instance=second)[1]
    assert not plain.stages_weights and "read while the worker sleeps" in str(plain)
    assert keeping.stages_weights and "read while requests run" in str(keeping)
    assert keeping.second_copy == keeping.weights == plain.weights
    assert plain.pages - keeping.pages == pytest.approx(plain.weights, abs=2 * 128 * TOKEN)
    assert fit(200)[1].stages_weights, "pages leave enough"
    with pytest.raises(ConfigError, match="2.47 GB for new weights"):
        fit(5, instance=second)


@pytest.mark.parametrize("speculate", ["off", "auto", "mtp"])
def test_weights_and_kv_are_those_of_the_loaded_model_with_the_layer_that_drafts(
    speculate: str,
) -> None:
    shape = find_geometry(str(SHIPPED_MODEL))
    instance = replace(SMALL, speculate=speculate)
    planned = bytes_per_device(shape, instance, "float32")
    on_gpu = bytes_per_device(shape, instance, "float32", "gpu").token
    assert (on_gpu > planned.token) == (speculate == "auto")
    load = loader(str(SHIPPED_MODEL), "float32", speculate=speculate)
    model = load(Layout(), jax.devices()[:1]).model
    assert (model.next_token is None) == (speculate != "mtp")
    assert planned.token == model.kv_spec.bytes_per_token
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))  # type: ignore[arg-type]
    assert planned.weights == pytest.approx(stored, rel=2e-3), "norms are not counted"


V3_LAYER = 187_105_280 + 257 * 3 * 7168 * 2048 + 256 * 7168 + 2 * 7168**2


@pytest.mark.parametrize(
    ("model", "parameters", "kv"),
    [
        ("deepseek-v3", V3_LAYER, 576),
        ("glm-4.6", 2 * 5120 * 104 * 128 + 161 * 3 * 5120 * 1536 + 160 * 5120 + 2 * 5120**2, 2048),
        ("kimi-k2.5", 0, 0),
        ("deepseek-v3.2", V3_LAYER + 1536 * 64 * 128 + 7168 * (128 + 64), 576 + 128),
    ],
)
def test_the_next_token_layer_of_a_catalogue_model_is_counted_where_it_is_loaded(
    model: str, parameters: int, kv: int
) -> None:
    """On accelerators by default; on CPUs if it is asked for. It is counted as the last layer,
    with the matrix that joins token and hidden state."""

    def planned(speculate: str, platform: str) -> tuple[int, int]:
        asked = replace(SMALL, speculate=speculate)
        return bytes_per_device(geometry(model), asked, "bfloat16", platform)[:2]

    plain = planned("off", "gpu")
    for how in (("auto", "gpu"), ("mtp", "cpu")):
        weights, token = planned(*how)
        assert (weights - plain[0], token - plain[1]) == (2 * parameters, 2 * kv)
    assert planned("auto", "cpu") == planned("ngram", "gpu") == plain


def test_a_drafter_that_would_not_draft_is_refused(tmp_path: Path) -> None:
    model = replace(BF16, draft=str(tmp_path))
    for drafts in ("auto", "eagle", "assistant"):
        fit(10, MIXED, replace(SMALL, speculate=drafts), model)
    for speculate, layout, remedy in (
        ("off", Layout(), "speculate=off and pp=1; remove --draft, or set --speculate=auto$"),
        ("ngram", Layout(), "speculate=ngram"),
        ("mtp", Layout(), "speculate=mtp"),
        ("auto", Layout(pp=2), "speculate=auto and pp=2; .*--speculate=auto and pp=1"),
    ):
        instance = replace(SMALL, speculate=speculate, layout=layout)
        with pytest.raises(ConfigError, match=f"draft={tmp_path}: a separate drafter .*{remedy}"):
            fit(10, MIXED, instance, model)


def test_an_assistant_is_counted_without_kv() -> None:
    folder, model = str(GOLDEN / "assistants" / "clusters"), str(GOLDEN / "gemma4_clusters")
    shape, instance = find_geometry(model), replace(SMALL, speculate="assistant")
    plain, planned = (
        bytes_per_device(shape, instance, "bfloat16", draft=draft) for draft in ("", folder)
    )
    assert planned.token == plain.token
    sizes = find_geometry(model, draft=folder).assistant
    assert sizes is not None and sizes.layers == 4
    load = loader(model, "bfloat16", speculate="assistant", draft=folder)
    loaded = load(Layout(), jax.devices()[:1]).model
    arrays = jax.tree.leaves(nnx.state(loaded.next_token))  # type: ignore[arg-type]
    stored = sum(leaf.nbytes for leaf in arrays)
    assert planned.weights - plain.weights == pytest.approx(stored, rel=0.2), "a header beside"
    assert 2 * sizes.parameters == pytest.approx(stored, rel=0.05), "norms are not counted"
    with pytest.raises(ConfigError, match="speculate=eagle: .* got assistant"):
        loader(model, "bfloat16", speculate="eagle", draft=folder)(Layout(), jax.devices()[:1])


@pytest.mark.parametrize("name", ["qwen3_5_images", "mistral3_images"])
def test_the_vision_encoder_and_kept_images_are_counted(name: str) -> None:
    """The encoder's weights on every worker; images stay where prompts are computed."""
    folder = str(GOLDEN / name)
    shape = find_geometry(folder)
    assert shape.images is not None
    planned = bytes_per_device(shape, SMALL, "float32").weights
    planned -= bytes_per_device(replace(shape, images=None), SMALL, "float32").weights
    model = loader(folder, "float32")(Layout(), jax.devices()[:1]).model
    stored = [leaf for leaf in jax.tree.leaves(nnx.state(model.vision)) if leaf.ndim > 1]  # type: ignore[arg-type]
    assert planned == sum(leaf.nbytes for leaf in stored), "norms and biases are not counted"
    for role, kept in ((PREFILL, shape.images.kept_rows), (DECODE, 0)):
        of = replace(shape, linear=None)
        _, plan = fit(100, role, model=ModelConfig(dtype="float32"), shape=of)
        assert plan.images == kept * shape.width * 4
        assert ("encoded images" in str(plan)) == bool(kept)


def device(platform: str, stats: dict[str, int] | None) -> Any:
    """Stands in for a JAX device."""
    kind = f"{platform} kind"
    return SimpleNamespace(platform=platform, device_kind=kind, memory_stats=lambda: stats)


def test_an_accelerators_memory_is_its_own_or_an_error() -> None:
    whole = {"bytes_limit": 32_000_000_000}
    tpu, gpu = device("tpu", whole), device("gpu", whole)
    assert device_memory([tpu], None).bytes == 28_800_000_000
    assert device_memory([tpu], 0.5).bytes == 16_000_000_000
    # XLA's limit on a GPU contains the fraction
    assert device_memory([gpu], 0.5).bytes == 32_000_000_000
    for stats in (None, {}, {"bytes_in_use": 5}):
        with pytest.raises(ConfigError, match="the memory of a tpu kind must be known"):
            device_memory([tpu, device("tpu", stats)], None)


def test_heads_of_64_take_twice_their_bytes_in_pages_of_128_lanes() -> None:
    plain, padded = (fit(10, platform=platform)[1] for platform in ("gpu", "tpu"))
    room = plain.memory.bytes - plain.total + plain.pages
    assert padded.pages <= room and padded.total <= padded.memory.bytes
    assert padded.pages / padded.tokens_per_rank == 2 * plain.pages / plain.tokens_per_rank


def test_no_more_pages_than_all_slots_can_use() -> None:
    assert fit(80, model=replace(BF16, context_tokens=1000))[0].pages_per_rank == 16 * 8
    few = replace(SMALL, slots_per_rank=1, page_size=8)
    instance, plan = fit(10, MIXED, few, replace(BF16, context_tokens=64))
    assert (instance.pages_per_rank, plan.context_tokens) == (8, 64)


def test_a_context_that_nobody_asked_for_is_cut_and_one_that_was_is_refused_with_the_sum() -> None:
    engine = EngineConfig(model=BF16, prefill=SMALL, decode=SMALL)
    cut, plans = fit_engine(engine, ONE_B, memory(5))
    assert cut.model.context_tokens == min(plan.context_tokens for plan in plans) < 131_072
    assert cut.model.context_tokens % 128 == 0 and "context" in str(plans[0])
    asked = replace(engine, model=replace(BF16, context_tokens=131_072))
    with pytest.raises(ConfigError, match=r"one-b does not fit.*weights.*in all, and has 5.00 GB"):
        fit_engine(asked, ONE_B, memory(5))


def test_pages_that_were_asked_for_are_kept_or_refused_and_do_not_cut_the_context() -> None:
    asked = replace(SMALL, pages_per_rank=4)
    kept, plan = fit(10, PREFILL, asked)
    assert kept == asked
    assert (plan.tokens_per_rank, plan.context_tokens) == (512, 131_072)
    with pytest.raises(ConfigError, match="lower"):
        fit(10, PREFILL, replace(SMALL, pages_per_rank=3000))


def test_what_is_on_its_way_to_host_memory_is_room_of_its_worker() -> None:
    config = EngineConfig(model=BF16, prefill=SMALL, decode=SMALL)
    keeps = replace(config, prefix=PrefixConfig(True, host_gib=1.0))
    (prefill, decode), (prefill_with_host, decode_with_host) = (
        fit_engine(one, ONE_B, memory(20))[1] for one in (config, keeps)
    )
    assert prefill_with_host.staged - prefill.staged == 32 * 128 * TOKEN
    assert decode_with_host.staged - decode.staged == 32 * 128 * TOKEN


def test_a_decode_worker_that_appends_has_room_for_the_chunks_that_it_computes() -> None:
    """As much as a prefill worker of such chunks, whose samples are as many as the step's rows: 8
    slots, and 8 rows of drafts beside them."""
    few = replace(SMALL, slots_per_rank=8)
    plain, appends = (
        fit(20, instance=few, prefix=PrefixConfig(True, append_tokens=tokens))[1]
        for tokens in (0, 256)
    )
    prefill = fit(20, PREFILL, replace(few, chunk_tokens=256, min_chunk_tokens=64))[1]
    drafts = fit(20, instance=few, platform="gpu")[1]  # three rows of drafts a slot
    logits = 3 * 4 * ONE_B.vocabulary
    assert drafts.activations >= plain.activations + (8 + 24 - 16) * logits
    assert plain.activations < appends.activations == prefill.activations
    assert appends.total <= appends.memory.bytes


@pytest.mark.parametrize(("codec", "chunks"), [("none", 1), ("fp8", 0)])
def test_what_a_decode_worker_has_given_and_is_not_fetched_is_room_of_it(
    codec: str, chunks: int
) -> None:
    decode = replace(SMALL, codec=codec)
    alone, gives = (
        fit(20, instance=decode, prefix=PrefixConfig(True, peer_fetch=fetches))[1]
        for fetches in (False, True)
    )
    assert gives.staged - alone.staged == chunks * SMALL.chunk_tokens * TOKEN


def test_states_of_the_sequences_in_slots_and_of_those_ahead_are_counted_beside_pages() -> None:
    """A quarter as many sequences are ahead as there are slots."""
    hybrid = replace(ONE_B, linear=LinearAttention(12, 8, 8, 128, 128, 4))
    _, plan = fit(20, shape=hybrid)
    assert plan.states == (16 + 4) * hybrid.state_bytes() and "sequence states" in str(plan)
    assert plan.total <= plan.memory.bytes
    with pytest.raises(ConfigError, match="of sequence states and"):
        fit(2, MIXED, shape=hybrid)


def test_layers_with_a_window_hold_window_and_page_of_each_sequence_on_a_decode_mesh() -> None:
    """At 32K of context, five of six layers with a window: a sixth of the pages' bytes."""
    model, layer = replace(BF16, context_tokens=32_768), 2 * 8 * 64 * 2
    instance, plan = fit(40, model=model, shape=WINDOWED)
    assert instance.pages_per_rank == 16 * 256
    assert plan.pages == 16 * 32_768 * 3 * layer
    assert plan.rings == (16 + 4) * (1024 + 128) * 15 * layer and "sliding windows" in str(plan)
    same, whole = fit(40, MIXED, model=model, shape=WINDOWED)
    assert not whole.rings and whole.pages == same.pages_per_rank * 128 * 18 * layer  # type: ignore[operator]


@pytest.mark.parametrize("gigabytes", [4, 6, 40])
def test_layers_with_a_window_hold_windows_of_prompts_and_a_chunk_on_a_prefill_mesh(
    gigabytes: float,
) -> None:
    """As many pages as the mesh's limits; more ordinary ones than with windows in them."""
    model, layer = replace(BF16, context_tokens=32_768), 2 * 8 * 64 * 2
    spec = KVSpec.attention(18, 8, 64, "bfloat16", (None,) * 3 + (1024,) * 15)
    instance, plan = fit(gigabytes, PREFILL, model=model, shape=WINDOWED)
    pages = instance.pages_per_rank
    assert pages is not None and plan.pages == pages * 128 * 3 * layer
    limits = mesh_limits(instance, Mode.DISAGGREGATED, spec, 32_768, None, windows_apart=True)
    assert plan.rings == limits.window_pages_per_rank * 128 * 15 * layer
    assert plan.total <= plan.memory.bytes
    if gigabytes < 40:
        assert plan.memory.bytes - plan.total < 128 * 18 * layer, "one page more has no room"
        assert pages > 1.9 * (plan.pages + plan.rings) // (128 * 18 * layer)
    windows = window_pages(pages, 128, 1024, 32_768, SMALL.chunk_tokens)
    assert limits.window_pages_per_rank == windows


def test_pages_of_windows_are_those_of_a_prompt_and_a_window_of_each_4096_tokens() -> None:
    """A prompt in computation needs 20 pages (a window of 8 and a chunk of 12), and three windows
    of 9 pages."""
    asked = (4096, 256, 40, 10)
    found = [window_pages(pages, 128, 1024, 32_768, 1408) for pages in asked]
    assert found == [47 + 1152, 47 + 72, 40, 10]


def test_a_mesh_of_more_devices_holds_less_on_each() -> None:
    one = bytes_per_device(ONE_B, SMALL, "bfloat16")
    four = bytes_per_device(ONE_B, replace(SMALL, layout=Layout(tp=4)), "bfloat16")
    assert four[1] * 4 == one[1] and one[0] / 4 <= four[0] < one[0] / 3.9


def test_quantized_matrices_are_counted_by_their_bits() -> None:
    whole = bytes_per_device(ONE_B, SMALL, "bfloat16")[0]
    embedding = 2 * ONE_B.embedding_parameters
    for bits in (8, 4):
        found = bytes_per_device(replace(ONE_B, matrix_bits=bits), SMALL, "bfloat16")[0]
        assert found == embedding + (whole - embedding) * bits // 16


def test_virtual_devices_share_their_host_evenly() -> None:
    devices = jax.devices("cpu")[:2]
    half = device_memory(devices, 0.5)
    assert half.bytes == pytest.approx(host_memory() * 0.25, abs=2)
    assert device_memory(devices, 0.5, sharers=4).bytes == pytest.approx(half.bytes / 4, abs=2)


def test_a_host_keeps_no_more_kv_than_it_has_memory_for_beside_its_devices() -> None:
    device, whole = jax.devices("cpu")[0], host_memory() / (1 << 30)
    check_host_cache(PrefixConfig(True, host_gib=0.39 * whole), device, None)
    check_host_cache(PrefixConfig(True, host_gib=0.69 * whole), device, 0.2)
    with pytest.raises(ConfigError, match=r"does not fit: .* 50% are for devices .*--host_cache"):
        check_host_cache(PrefixConfig(True, host_gib=0.41 * whole), device, None)
    with pytest.raises(ConfigError, match="each of 2 workers"):
        check_host_cache(PrefixConfig(True, host_gib=0.3 * whole), device, None, sharers=2)


H200_RECIPES = {
    "llama3_8b": "llama-3-8b",
    "qwen3_235b": "qwen3-235b-a22b",
    "deepseek_v3": "deepseek-v3",
    "kimi_k2": "kimi-k2.5",
    "glm_4_6": "glm-4.6",
    "minimax_m2": "minimax-m2.5",
    "minimax_m3": "minimax-m3",
    "qwen3_6_35b": "qwen3.6-35b-a3b",
    "gpt_oss_120b": "gpt-oss-120b",
    "gemma_4_31b": "gemma-4-31b",
}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*_h200.py")), ids=lambda path: path.stem)
def test_every_recipe_for_an_h200_fits_one(path: Path) -> None:
    device = DeviceMemory(int(0.9 * accelerator("h200").memory_bytes), "0.9 of an H200", "gpu")
    asked = load_recipe(str(path))
    kept = as_kept(geometry(H200_RECIPES[path.stem.removesuffix("_h200")]), asked.model)
    config, plans = fit_engine(asked, kept, device)
    for instance in (asked.prefill, asked.decode):
        check_layout(kept, instance.layout)
    for plan in plans:
        assert plan.total <= device.bytes
        assert plan.tokens_per_rank >= 2 * plan.context_tokens, "room for two of the longest"
    assert config.model.context_tokens == asked.model.context_tokens


GEMMA_3_27B = CostGeometry(
    "gemma-3-27b", 5376, 62, 262_208, GroupedAttention(32, 16, 128, 1024, 52), 21_504, tied=True
)


@pytest.mark.parametrize("model", [GEMMA_3_27B, geometry("gpt-oss-120b")], ids=lambda m: m.name)
@pytest.mark.parametrize("context", [8192, 131_072])
def test_a_prefix_cache_costs_a_decode_worker_of_layers_with_windows_no_more_than_a_tenth(
    model: CostGeometry, context: int
) -> None:
    """All memory, and what is not weights."""
    off, on = (
        fit(10_000, model=replace(BF16, context_tokens=context), shape=model, prefix=prefix)[1]
        for prefix in (NO_PREFIX, PrefixConfig(True, peer_fetch=True, append_tokens=256))
    )
    assert off.rings == on.rings > 0 and off.pages == on.pages
    assert on.total - on.weights <= 1.1 * (off.total - off.weights)


def test_processes_that_hold_different_ranks_keep_no_kv_on_disk() -> None:
    on_disk = PrefixConfig(True, host_gib=1.0, disk_dir="kv", disk_gib=1.0)
    check_disk_cache(on_disk, Layout(tp=4), 2)
    check_disk_cache(on_disk, Layout(dp=2, tp=2), 1)
    with pytest.raises(ConfigError, match="layouts without dp, not with .*--disk_cache_dir"):
        check_disk_cache(on_disk, Layout(dp=2, tp=2), 2)
