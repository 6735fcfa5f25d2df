"""config.json of published models with all their fields: each is read, gives the parameter count
and KV size that are published, and the sizes of the catalogue."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.costs.catalog import CATALOG
from jdisagg.layout.axes import Layout
from jdisagg.ops.activations import BoundedGate
from jdisagg.scheduler.blocks import layer_groups
from models.catalog import read_config
from models.decoder_config import DecoderConfig
from models.hf_config import HfConfig
from models.inspection import bytes_per_device, inspect
from tests.models.configs import PUBLISHED, Fields, not_refused, published, text_part

GEMMA_4, GEMMA_4_DENSE = "gemma-4-26B-A4B-it", "gemma-4-31B-it"
GEMMA_4_E2B, GEMMA_4_E4B = "gemma-4-E2B-it", "gemma-4-E4B-it"
# Parameters and those of a token, in billions, as published (here with embeddings and, where the
# model sees, without its eyes), and bytes of KV of a token in bfloat16.
SIZES: dict[str, tuple[float, float, int]] = {
    "DeepSeek-V3": (671.0, 37.6, 61 * (512 + 64) * 2),
    "DeepSeek-V3.2": (671.9, 38.4, 61 * (512 + 64 + 128) * 2),
    "GLM-4.6": (352.8, 33.6, 2 * 92 * 8 * 128 * 2),
    "GLM-5": (743.9, 41.8, 78 * (512 + 64 + 128) * 2),
    "Hunyuan-7B-Instruct": (7.5, 7.5, 2 * 32 * 8 * 128 * 2),
    "Hy3": (295.0, 20.7, 2 * 80 * 8 * 128 * 2),
    "K-EXAONE-236B-A23B": (236.6, 23.7, 2 * 48 * 8 * 128 * 2),
    "Kimi-K2.5": (1026.4, 32.9, 61 * (512 + 64) * 2),
    "Kimi-Linear-48B-A3B-Instruct": (49.1, 3.5, 7 * (512 + 64) * 2),
    "LFM2-1.2B": (1.2, 1.2, 6 * 2 * 8 * 64 * 2),
    "LFM2-8B-A1B": (8.3, 1.6, 6 * 2 * 8 * 64 * 2),
    "LFM3-1.7B": (1.7, 1.7, 11 * 2 * 4 * 128 * 2),
    "Laguna-S-2.1": (117.6, 8.4, 2 * 48 * 8 * 128 * 2),
    "Ling-3.0-flash": (124.4, 5.5, 7 * (512 + 64) * 2),
    "Ling-3.0-tiny": (7.9, 1.4, 6 * (512 + 64) * 2),
    "Llama-4-Scout-17B-16E-Instruct": (107.8, 17.2, 48 * 2 * 8 * 128 * 2),
    "MiMo-V2-Flash": (308.8, 15.4, (9 * 4 + 39 * 8) * (192 + 128) * 2),
    "MiniMax-M3": (426.2, 26.0, 60 * 2 * 4 * 128 * 2 + 57 * 128 * 2),
    "MiniMax-Text-01": (456.1, 48.4, 10 * 2 * 8 * 128 * 2),  # published without embeddings: 45.9
    "Mistral-Small-4-119B-2603": (119.0, 6.6, 36 * (256 + 64) * 2),
    "NVIDIA-Nemotron-3-Nano-30B-A3B": (31.6, 3.6, 6 * 2 * 2 * 128 * 2),
    "NVIDIA-Nemotron-Nano-9B-v2": (8.9, 8.9, 4 * 2 * 8 * 128 * 2),
    "North-Mini-Code": (30.5, 3.3, 2 * 49 * 4 * 128 * 2),
    "Phi-3-mini-128k-instruct": (3.8, 3.8, 2 * 32 * 32 * 96 * 2),
    "Qwen3.6-35B-A3B": (34.7, 3.5, 2 * 10 * 2 * 256 * 2),
    "Qwen3-235B-A22B": (235.1, 22.2, 94 * 2 * 4 * 128 * 2),
    "Solar-Open-100B": (102.7, 12.1, 2 * 48 * 8 * 128 * 2),
    "Step-3.5-Flash": (197.0, 12.0, 45 * 2 * 8 * 128 * 2),
    "Trinity-Nano-Preview": (6.1, 1.0, 2 * 56 * 2 * 128 * 2),
    "c4ai-command-r7b-12-2024": (8.0, 8.0, 32 * 2 * 8 * 128 * 2),
    GEMMA_4: (25.2, 3.8, (25 * 8 * 256 + 5 * 2 * 512) * 2 * 2),
    GEMMA_4_DENSE: (30.7, 30.7, (50 * 16 * 256 + 10 * 4 * 512) * 2 * 2),
    # of 15 and 24 layers; tables of 2.3 and 2.8 billion have one row for each token
    GEMMA_4_E2B: (4.6, 2.3, (12 * 256 + 3 * 512) * 2 * 2),
    GEMMA_4_E4B: (7.5, 4.6, (20 * 2 * 256 + 4 * 2 * 512) * 2 * 2),
    "gpt-oss-120b": (116.8, 5.7, 36 * 2 * 8 * 64 * 2),
    "granite-4.0-h-micro": (3.2, 3.2, 8192),
    "granite-4.0-h-small": (32.2, 8.8, 16384),
    "granite-4.0-h-tiny": (6.9, 1.5, 8192),
}
# The name in the catalogue, and next-token layers.
IN_THE_CATALOGUE = {
    "DeepSeek-V3": ("deepseek-v3", 1),
    "DeepSeek-V3.2": ("deepseek-v3.2", 1),
    "GLM-4.6": ("glm-4.6", 1),
    "GLM-5": ("glm-5", 1),
    "Kimi-K2.5": ("kimi-k2.5", 0),
    "Kimi-Linear-48B-A3B-Instruct": ("kimi-linear-48b-a3b", 0),
    "LFM3-1.7B": ("lfm3-1.7b", 0),
    "Ling-3.0-flash": ("ling-3.0-flash", 1),
    "MiniMax-M3": ("minimax-m3", 0),
    "MiniMax-Text-01": ("minimax-text-01", 0),
    "Qwen3-235B-A22B": ("qwen3-235b-a22b", 0),
    GEMMA_4_E2B: ("gemma-4-e2b", 0),
    GEMMA_4_E4B: ("gemma-4-e4b", 0),
    "gpt-oss-120b": ("gpt-oss-120b", 0),
}


def _read(name: str) -> DecoderConfig:
    return read_config(HfConfig(published(name)))


def _inspected(tmp_path: Path, fields: Fields) -> list[str]:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    return inspect(path).missing


def test_parameters_and_kv_are_those_published() -> None:
    found = {}
    for path in sorted(PUBLISHED.glob("*.json")):
        read = inspect(path)
        assert read.missing == [] and read.config is not None and read.geometry is not None
        geometry, kept = read.geometry, read.config.kv_spec("bfloat16")
        billions = (geometry.parameters / 1e9, geometry.active_parameters / 1e9)
        found[path.stem] = (*(round(each, 1) for each in billions), kept.bytes_per_token)
        assert geometry.kv_bytes_per_token("bfloat16") == kept.bytes_per_token, path.stem
        assert geometry.state_bytes() == kept.state.bytes_per_token, path.stem
    assert found == SIZES


def test_published_models_are_in_the_catalogue_as_they_are() -> None:
    for name, (known, next_token_layers) in IN_THE_CATALOGUE.items():
        assert _read(name).cost_geometry(known) == CATALOG[known], name
        assert CATALOG[known].next_token_layers == next_token_layers, name


@pytest.mark.parametrize(
    "schedule",
    [
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_pattern": "FFF" + "SSSF" * 18 + "SSS"},
    ],
)
def test_three_of_four_layers_of_glm_5_2_have_no_indexer(schedule: Fields) -> None:
    config, known = read_config(HfConfig(published("GLM-5") | schedule)), CATALOG["glm-5.2"]
    own = [at for at, layer in enumerate(config.layers) if layer.selects == "own"]
    assert own == [0, 1, 2, *range(6, 78, 4)]
    assert config.cost_geometry("glm-5.2") == known
    spec = config.kv_spec("bfloat16")
    assert spec.bytes_per_token == 89856 + 21 * 256 == known.kv_bytes_per_token("bfloat16")
    # programs begin where a layer selects
    for group in layer_groups(spec.cuts, 78, 8)[1:]:
        assert group.start in own
    # a next-token layer selects, although the last layer does not
    assert replace(config, next_token=True).kv_spec("bfloat16").layers[-1] == spec.layers[0]


@pytest.mark.parametrize(
    ("name", "latent", "index"),
    [("DeepSeek-V3.2", 70272, 15616), ("GLM-5", 89856, 19968), ("MiniMax-M3", 122880, 14592)],
)
def test_keys_of_an_indexer_are_kept_whole_beside_what_is_quantized(
    name: str, latent: int, index: int
) -> None:
    config = _read(name)
    parts = config.kv_spec("bfloat16").components
    assert sum(2 * each.width for each in parts if each.name == "index") == index
    assert replace(config, kv_dtype="fp8").kv_spec("bfloat16").bytes_per_token == (
        latent // 2 + index
    )


def test_each_device_has_the_whole_key_of_an_indexer() -> None:
    spec, known = _read("MiniMax-M3").kv_spec("bfloat16"), CATALOG["minimax-m3"]
    kv, index = 60 * 2 * 4 * 128 * 2, 57 * 128 * 2
    assert spec.bytes_per_device(4) == kv // 4 + index
    assert known.kv_rows() == [(60 * 2 * 4 * 4, 32), (57 * 4, 32)]  # a transfer sends it once


def test_state_of_kimi_linear_is_that_of_its_20_layers_and_latents_are_whole() -> None:
    # a float32 matrix of 128 x 128 for each of 32 heads, three inputs of q, k and v
    spec = _read("Kimi-Linear-48B-A3B-Instruct").kv_spec("bfloat16")
    assert spec.state.bytes_per_token == 20 * 32 * (128 * 128 * 4 + 3 * 3 * 128 * 2)
    assert spec.bytes_per_device(8) == spec.bytes_per_token


@pytest.mark.parametrize(
    ("name", "mamba", "attention"),
    [
        *[(f"granite-4.0-h-{size}", 36, 4) for size in ("small", "tiny", "micro")],
        ("NVIDIA-Nemotron-Nano-9B-v2", 27, 4),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B", 23, 6),
    ],
)
def test_layers_of_published_hybrids_are_of_the_kinds_that_they_say(
    name: str, mamba: int, attention: int
) -> None:
    config = _read(name)
    assert sum(layer.mamba is not None for layer in config.layers) == mamba
    assert sum(layer.mamba is None and layer.parts != "ffn" for layer in config.layers) == attention
    state = config.kv_spec("bfloat16").state.bytes_per_token
    assert bytes_per_device(config, Layout(tp=2), "bfloat16")[2] * 2 == state


def test_windows_and_contexts_are_as_transformers_reads_them() -> None:
    command = _read("c4ai-command-r7b-12-2024")
    assert [layer.window for layer in command.layers] == [4096, 4096, 4096, None] * 8
    assert [layer.rotated for layer in command.layers] == [True, True, True, False] * 8
    mimo = _read("MiMo-V2-Flash")
    assert {layer.window for layer in mimo.layers} == {None, 129}
    assert sum(layer.window is None for layer in mimo.layers) == 9
    assert {layer.rope.head_dim for layer in mimo.layers if layer.rope} == {64}
    assert _read("LFM2-1.2B").ffn == 8192
    minimax = _read("MiniMax-Text-01")
    assert minimax.attention.rope.head_dim == 64 and minimax.attention.head_dim == 128
    assert [layer.lightning is None for layer in minimax.layers] == ([False] * 7 + [True]) * 10
    assert {layer.factors for layer in minimax.layers} == {((3.5565588200778455, 1.0),) * 2}
    step = _read("Step-3.5-Flash")
    heads = [(step.attention_of(layer).query_heads, layer.window) for layer in step.layers]
    assert heads == ([(64, None), *[(96, 512)] * 3] * 12)[:45]
    rotated = [layer.rope.head_dim for layer in step.layers if layer.rope]
    assert rotated == ([64, 128, 128, 128] * 12)[:45]
    assert sum(layer.experts is not None for layer in step.layers) == 42
    assert [bool(layer.gate) for layer in step.layers] == [False] * 44 + [True]
    laguna = _read("Laguna-S-2.1")
    heads = [(laguna.attention_of(layer).query_heads, layer.window) for layer in laguna.layers]
    assert heads == [(48, None), *[(72, 512)] * 3] * 12
    rotated = [layer.rope.head_dim for layer in laguna.layers if layer.rope]
    assert rotated == [64, 128, 128, 128] * 12
    north = _read("North-Mini-Code")
    assert [layer.rotated for layer in north.layers] == [True, *[True, True, True, False] * 12]
    assert (north.ffn, north.experts and north.experts.ffn, north.norms_centred) == (
        3072,
        768,
        False,
    )
    # attention in chunks equals full attention up to one chunk
    assert _read("Llama-4-Scout-17B-16E-Instruct").context_tokens == 8192


def test_gemma_4_is_read_as_its_published_configs_state_it() -> None:
    config, dense = _read(GEMMA_4), _read(GEMMA_4_DENSE)
    windowed, full = config.attention, config.layers[5].attention
    assert full is not None
    assert [layer.window for layer in config.layers][:7] == [1024] * 5 + [None, 1024]
    assert (windowed.kv_heads, windowed.head_dim, windowed.keys_are_values) == (8, 256, False)
    assert (full.kv_heads, full.head_dim, full.keys_are_values) == (2, 512, True)
    assert (windowed.rope.theta, full.rope.theta) == (1e4, 1e6)
    assert (full.rope.type, full.rope.head_dim, full.rope.turned_pairs) == ("proportional", 512, 64)
    assert (windowed.scale, full.scale, config.logits_cap, config.tied) == (1.0, 1.0, 30.0, True)
    experts = config.experts
    assert experts is not None and (experts.experts, experts.experts_per_token) == (128, 8)
    assert (experts.ffn, experts.shared_ffn, experts.beside) == (704, 2112, True)
    assert dense.experts is None and (config.kv_heads, dense.kv_heads) == (2, 4)
    # of 50 layers with a window and 10 without one, two bytes a value
    kept = dense.kv_spec("bfloat16")
    assert kept.windowed.bytes_per_token == 50 * 2 * 16 * 256 * 2
    assert kept.unwindowed.bytes_per_token == 10 * 2 * 4 * 512 * 2
    assert kept.can_part and config.kv_spec("bfloat16").can_part


def test_layers_of_gemma_4_e2b_and_e4b_read_the_kv_of_the_last_layer_of_their_kind() -> None:
    for name, own, every, wide in ((GEMMA_4_E2B, 15, 5, 2), (GEMMA_4_E4B, 24, 6, 0)):
        config = _read(name)
        count = len(config.layers)
        full = [at % every == every - 1 for at in range(own, count)]
        assert [layer.source for layer in config.layers] == [None] * own + [
            own - 1 if whole else own - 2 for whole in full
        ]
        assert {layer.ffn for layer in config.layers[own:]} == {wide * config.ffn}
        assert {layer.ffn for layer in config.layers[:own]} == {0}
        spec = config.kv_spec("bfloat16")
        assert (
            spec.can_part and spec.positioned == tuple(range(own)) and spec.last_stored == own - 1
        )
        # one program has the layers whose KV is read, and those that read it
        for groups in (1, 4, 100):
            last = layer_groups(spec.cuts, count, groups)[-1]
            assert last.start <= own - 2 and last.stop == count


def test_gates_of_the_last_layers_of_ling_3_are_bounded() -> None:
    config = _read("Ling-3.0-flash")
    routed = [layer.experts and layer.experts.clamp for layer in config.layers]
    assert routed == [None] * 35 + [BoundedGate(4.0)] * 7
    shared = [None] * 34 + [BoundedGate(5.0)] * 6 + [BoundedGate(7.0)] * 2
    assert [layer.gate for layer in config.layers] == shared
    kinds = [layer.delta is None for layer in config.layers]
    assert kinds == ([False] * 5 + [True]) * 7
    # a float32 matrix of 128 x 128 for each of 32 heads, three inputs of q, k and v
    state = config.kv_spec("bfloat16").state.bytes_per_token
    assert state == 35 * 32 * (128 * 128 * 4 + 3 * 3 * 128 * 2)


def test_sizes_by_layer_are_read_as_transformers_writes_them() -> None:
    by_layer = {str(at): {"head_dim": 512, "num_key_value_heads": 4} for at in range(5, 60, 6)}
    absent = {"global_head_dim": None, "num_global_key_value_heads": None}

    def written(form: object) -> DecoderConfig:
        return read_config(HfConfig(text_part(GEMMA_4_DENSE, **absent, per_layer_config=form)))

    padded = {key.zfill(2): sizes for key, sizes in by_layer.items()}
    for form in (by_layer, padded):
        assert written(form) == _read(GEMMA_4_DENSE)
    alike = written({}).layers[5].attention
    assert alike is not None and (alike.kv_heads, alike.head_dim) == (16, 256)
    unlike = by_layer | {"4": {"head_dim": 512}}
    wrong = ({"5": {"head_dim": 64}}, unlike, {"5": 3}, {"x": {}}, [1])
    said = "per_layer_config must give the same head_dim"
    assert not_refused(written, ((said, form) for form in wrong)) == []


def _minimax(**sparse: object) -> Fields:
    text = published("MiniMax-M3")["text_config"]
    assert isinstance(text, dict)
    return text_part("MiniMax-M3", sparse_attention_config=text["sparse_attention_config"] | sparse)


def _refused_by_name() -> Iterable[tuple[str, Fields]]:
    qwen, mistral, hy = "Qwen3.6-35B-A3B", "Mistral-Small-4-119B-2603", published("Hy3")
    yield "0.5 contradicts .* which state 0.25", text_part(qwen, partial_rotary_factor=0.5)
    yield "n_group must be 1", text_part(mistral, n_group=4, topk_group=2)
    said = "must be partial_rotary_factor=0.5 times 96 values"
    yield said, text_part(mistral, qk_rope_head_dim=32)
    yield "route_norm must be true", hy | {"route_norm": False}
    said = "expert_hidden_dim must be moe_intermediate_size=1536"
    yield said, hy | {"expert_hidden_dim": 768}
    other = {"architectures": ["KimiVLForConditionalGeneration"]}
    yield "must hold 'KimiK25For", published("Kimi-K2.5") | other
    for shared in (
        {"index_topk_pattern": "FSS"},
        {"index_topk_pattern": "S" + "F" * 77},
        {"indexer_types": ["full"] * 77 + ["other"]},
    ):
        yield "must be 'full' or 'shared' for each of 78 layers", published("GLM-5") | shared
    for sparse in (
        {"sparse_init_block": 1},
        {"sparse_score_type": "mean"},
        {"sparse_num_index_heads": 8},
        {"sparse_local_block": 0},
        {"sparse_disable_index_value": [0] * 60},
        {"sparse_something_new": 1},
    ):
        yield "sparse_attention_config", _minimax(**sparse)
    for field, value in (
        ("num_kv_shared_layers", 30),
        ("num_kv_shared_layers", 27),
        ("use_bidirectional_attention", "all"),
        ("num_global_key_value_heads", 5),
        ("top_k_experts", 200),
        ("layer_types", ["sliding_attention"] * 30),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
    ):
        yield field, text_part(GEMMA_4, **{field: value})
    small = text_part(GEMMA_4_E2B, vocab_size_per_layer_input=1000)
    yield "vocab_size_per_layer_input must equal vocab_size=262144", small
    ling = published("Ling-3.0-tiny")
    older = {"architectures": ["BailingMoeV2_5ForCausalLM"]}
    yield "must hold 'BailingMoeV3ForCausalLM' for model_type 'bailing_hybrid'", ling | older
    yield "linear_attention must be 'kda'", ling | {"linear_attention": "gla"}
    unknown = {name: value for name, value in ling.items() if not name.startswith(("arch", "kda"))}
    yield "architectures must be stated", unknown
    yield "expert_swiglu_limit_list must have a number", ling | {"expert_swiglu_limit_list": [4.0]}
    lfm = published("LFM3-1.7B")
    yield "sliding_window must be set", lfm | {"sliding_window": None}
    yield "layer_types must list full_attention or conv or sliding", lfm | {"layer_types": ["conv"]}
    yield r"of an even size \(2 kv heads of 511\)", text_part(GEMMA_4, global_head_dim=511)
    partly = {"full_attention": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}
    yield "partial_rotary_factor", text_part(GEMMA_4, rope_parameters=partly)


def test_one_that_says_something_else_is_refused_by_name() -> None:
    assert not_refused(lambda fields: read_config(HfConfig(fields)), _refused_by_name()) == []


def test_what_is_named_as_missing_is_missing(tmp_path: Path) -> None:
    """A disabled window is not listed, nor are fields beside refused rotary positions."""
    phi = published("Phi-3-mini-128k-instruct")
    off = {"model_type": "stablelm", "sliding_window": 9, "use_sliding_window": False}
    other = phi | off | {"rope_scaling": None}
    assert _inspected(tmp_path, other) == ["the family 'stablelm'"]
    (said,) = _inspected(tmp_path, phi | {"rope_scaling": {"type": "spiral"}})
    assert "rope_type 'spiral'" in said


def test_a_gemma_3_that_sees_bounds_no_logits_as_transformers_has_it() -> None:
    text = {"head_dim": 8, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text |= {"final_logit_softcapping": 30.0}
    alone = read_config(HfConfig({"model_type": "gemma3_text"} | text))
    seeing = read_config(HfConfig({"model_type": "gemma3", "text_config": text}))
    assert (alone.logits_cap, seeing.logits_cap) == (30.0, 0.0)
