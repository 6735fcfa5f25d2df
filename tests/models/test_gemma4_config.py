"""config.json of Gemma 4 as published and as transformers 5 writes it. Unsupported features are
refused by name."""

import pytest

from jdisagg.errors import CheckpointError
from models.catalog import read_config
from models.decoder_config import DecoderConfig
from models.hf_config import HfConfig

# google/gemma-4-26B-A4B-it and -31B-it, as transformers' own conversion has them
GEMMA_4 = {
    "model_type": "gemma4_text",
    "hidden_size": 2816,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 2112,
    "num_hidden_layers": 30,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "use_bidirectional_attention": "vision",
    "num_kv_shared_layers": 0,
    "enable_moe_block": True,
    "num_experts": 128,
    "moe_intermediate_size": 704,
    "top_k_experts": 8,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 262144,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
            "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}
GEMMA_4_DENSE = GEMMA_4 | {
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 60,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "enable_moe_block": False,
    "num_experts": None,
    "moe_intermediate_size": None,
    "top_k_experts": None,
}


def _gemma_4(text: dict[str, object]) -> DecoderConfig:
    outer = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"]}
    beside = {"vision_soft_tokens_per_image": 280, "vision_config": {}, "audio_config": None}
    return read_config(HfConfig({**outer, **beside, "text_config": text}))


def test_gemma_4_is_read_as_its_published_configs_state_it() -> None:
    config, dense = _gemma_4(GEMMA_4), _gemma_4(GEMMA_4_DENSE)
    windowed, full = config.attention, config.layers[5].attention
    assert full is not None and [layer.window for layer in config.layers][:7] == [1024] * 5 + [
        None,
        1024,
    ]
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
    assert config.cost_geometry("m").parameters / 1e9 == pytest.approx(25.2, abs=0.1)
    assert config.cost_geometry("m").active_parameters / 1e9 == pytest.approx(3.8, abs=0.1)
    assert dense.cost_geometry("m").parameters / 1e9 == pytest.approx(30.7, abs=0.1)


def test_sizes_by_layer_are_read_as_transformers_writes_them() -> None:
    by_layer = {str(at): {"head_dim": 512, "num_key_value_heads": 4} for at in range(5, 60, 6)}
    sizes = ("global_head_dim", "num_global_key_value_heads")
    written = {name: value for name, value in GEMMA_4_DENSE.items() if name not in sizes}
    padded = {key.zfill(2): sizes for key, sizes in by_layer.items()}
    for form in (by_layer, padded):
        assert _gemma_4(written | {"per_layer_config": form}) == _gemma_4(GEMMA_4_DENSE)
    alike = _gemma_4(written | {"per_layer_config": {}}).layers[5].attention
    assert alike is not None and (alike.kv_heads, alike.head_dim) == (16, 256)
    for wrong in (
        {"5": {"head_dim": 64}},
        by_layer | {"4": {"head_dim": 512}},
        {"5": 3},
        {"x": {}},
        [1],
    ):
        with pytest.raises(CheckpointError, match="per_layer_config must give the same head_dim"):
            _gemma_4(written | {"per_layer_config": wrong})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size_per_layer_input", 256),
        ("num_kv_shared_layers", 18),
        ("use_double_wide_mlp", True),
        ("use_bidirectional_attention", "all"),
        ("num_global_key_value_heads", 5),
        ("top_k_experts", 200),
        ("layer_types", ["sliding_attention"] * 30),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
    ],
)
def test_what_gemma_4_has_beyond_it_or_cannot_have_is_refused_by_name(
    field: str, value: object
) -> None:
    with pytest.raises(CheckpointError, match=field):
        _gemma_4(GEMMA_4 | {field: value})
    silent = {name: each for name, each in GEMMA_4.items() if "layer_input" not in name}
    with pytest.raises(CheckpointError, match="hidden_size_per_layer_input must be stated"):
        _gemma_4(silent)
    with pytest.raises(CheckpointError, match="of an even size \\(2 kv heads of 511\\)"):
        _gemma_4(GEMMA_4 | {"global_head_dim": 511})
    partly = {"full_attention": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}
    with pytest.raises(CheckpointError, match="partial_rotary_factor"):
        _gemma_4(GEMMA_4 | {"rope_parameters": partly})
