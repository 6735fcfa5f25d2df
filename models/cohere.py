"""Reads the configuration of Cohere's Command R and Command A, and of Aya. They have attention and
feed-forward in parallel after one LayerNorm without a bias, interleaved rotary positions, and
scaled logits. The second version has windows in most layers, and rotary positions only in these
layers."""

from dataclasses import replace

from models.decoder_config import DecoderConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import (
    read_decoder,
    read_layer_types,
    read_window,
    refuse_windows,
    with_windows,
)

DEFAULTS = FamilyDefaults(kv_heads=None, context_tokens=8192, tied=True)
# Fields of released checkpoints with a single supported value.
_ONLY: dict[str, object] = {
    "use_parallel_block": True,
    "use_gated_activation": True,
    "use_qk_norm": False,
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "order_of_interleaved_layers": "local_attn_first",
}


def read_config(hf: HfConfig) -> DecoderConfig:
    refuse_windows(hf, "this family uses full attention")
    return _read(hf)


def read_2_config(hf: HfConfig) -> DecoderConfig:
    hf.pass_over("layer_switch")  # the pattern under another name
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


def _read(hf: HfConfig) -> DecoderConfig:
    for field, only in _ONLY.items():
        if hf.raw(field) not in (None, only) and not hf.sizes_only:
            raise hf.error(field, f"must be {only!r}", "another form of it is not supported")
    hf.pass_over("use_embedding_sharing", "use_parallel_embedding")
    bias = hf.flag("attention_bias", False)
    config = read_decoder(hf, DEFAULTS, qkv_bias=bias, output_bias=bias)
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
