"""Reads the configuration of Cohere's Command R and Command A, and of Aya. They have attention and
feed-forward in parallel after one LayerNorm without a bias, interleaved rotary positions, and
scaled logits. The second version has windows in most layers, and rotary positions only in these
layers."""

from dataclasses import replace

from models.decoder_config import DecoderConfig, ExpertConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import (
    read_decoder,
    read_layer_types,
    read_window,
    refuse_windows,
    with_windows,
)
from models.hf_experts import count_experts, sparse_layers, with_experts

DEFAULTS = FamilyDefaults(kv_heads=None, context_tokens=8192, tied=True)
# Fields of released checkpoints with a single supported value.
_ONLY: dict[str, object] = {
    "use_parallel_block": True,
    "use_gated_activation": True,
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "order_of_interleaved_layers": "local_attn_first",
}


def read_config(hf: HfConfig) -> DecoderConfig:
    refuse_windows(hf, "this family uses full attention")
    return _read(hf)


def read_2_config(hf: HfConfig) -> DecoderConfig:
    hf.pass_over("layer_switch")  # the pattern under another name
    hf.require({"use_qk_norm": False})
    config = _read(hf)
    pattern = hf.count("sliding_window_pattern", 4)
    count, window = len(config.layers), read_window(hf, 4096)
    default = [at % pattern != 0 for at in range(1, count + 1)]
    windows = read_layer_types(hf, count, window, default)
    layers = (
        replace(layer, rotated=layer.window is not None)
        for layer in with_windows(config, windows).layers
    )
    return replace(config, layers=tuple(layers))


def read_moe_config(hf: HfConfig) -> DecoderConfig:
    """Reads the config.json of Command A+: experts behind dense layers, which may have windows in
    another pattern, and rotary positions without one."""
    hf.require({"use_qk_norm": False})
    scores, joined = hf.raw("expert_selection_fn"), hf.raw("shared_expert_combination_strategy")
    if scores not in (None, "softmax", "sigmoid"):
        raise hf.error("expert_selection_fn", "must be 'softmax' or 'sigmoid'", "correct it")
    if joined not in (None, "average", "sum"):
        raise hf.error(
            "shared_expert_combination_strategy", "must be 'average' or 'sum'", "correct it"
        )
    config = _read(hf, 128)
    if hf.has("rms_norm_eps"):
        epsilon = hf.number("rms_norm_eps", 1e-5)
        config = replace(config, norm_epsilon=epsilon, norms_centred=False)
    sigmoid, ffn = scores == "sigmoid", config.ffn
    experts = ExpertConfig(
        count_experts(hf, 8),
        hf.count("num_experts_per_tok", 2),
        ffn,
        hf.flag("norm_topk_prob", True) or not sigmoid,
        shared_ffn=ffn * hf.count("num_shared_experts", 0, least=0),
        scores="sigmoid" if sigmoid else "softmax",
        halved=joined != "sum",
    )
    count, dense = len(config.layers), hf.count("first_k_dense_replace", 0, least=0)
    first, pattern = (
        hf.count(f"{name}sliding_window_pattern", usual)
        for name, usual in (("prefix_dense_", 1), ("", 4))
    )
    default = [at % first != 0 for at in range(1, dense + 1)]
    default += [at % pattern != 0 for at in range(1, count - dense + 1)]
    windows = read_layer_types(hf, count, read_window(hf, 4096), default)
    config = replace(config, ffn=hf.count("prefix_dense_intermediate_size", ffn))
    config = with_experts(hf, with_windows(config, windows), experts, sparse_layers(hf, config, 0))
    layers = (
        replace(each, rotated=each.window is not None or (each.experts is None and first == 1))
        for each in config.layers
    )
    return replace(config, layers=tuple(layers))


def _read(hf: HfConfig, head_dim: int | None = None) -> DecoderConfig:
    hf.require(_ONLY)
    hf.pass_over("use_embedding_sharing", "use_parallel_embedding")
    bias = hf.flag("attention_bias", False)
    own = "own" if hf.flag("use_qk_norm", False) else ""
    config = read_decoder(
        hf, DEFAULTS, qkv_bias=bias, output_bias=bias, qk_norm=own, head_dim_default=head_dim
    )
    scale = hf.number("logit_scale", 0.0625)
    if scale <= 0:
        raise hf.error("logit_scale", "must be positive", "correct it")
    attention = replace(config.attention, rope=replace(config.attention.rope, interleaved=True))
    return replace(
        config,
        attention=attention,
        norm_epsilon=hf.number("layer_norm_eps", 1e-5),
        norms_centred=True,
        side_by_side=True,
        logits_divisor=1 / scale,
    )
