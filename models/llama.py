"""Reads the configuration of Llama 2 and 3.x, and of other models of the same form: optional biases
on all projections, one head size, no window. Arcee's AFM, ERNIE 4.5 and Hunyuan (dense) differ from
Llama by one option each."""

from dataclasses import replace

from models.decoder_config import DecoderConfig
from models.hf_config import FamilyDefaults, HfConfig, checked_number
from models.hf_decoder import read_decoder, refuse_windows

DEFAULTS = FamilyDefaults(kv_heads=None, context_tokens=2048)
ERNIE_DEFAULTS = FamilyDefaults(
    kv_heads=2, context_tokens=131072, norm_epsilon=1e-5, rope_theta=500000.0, tied=True
)


def read_config(hf: HfConfig) -> DecoderConfig:
    refuse_windows(hf, "the Llama family uses full attention")
    bias = hf.flag("attention_bias", False)
    config = read_decoder(hf, DEFAULTS, qkv_bias=bias, output_bias=bias)
    return replace(config, mlp_bias=hf.flag("mlp_bias", False))


def read_arcee_config(hf: HfConfig) -> DecoderConfig:
    """Reads the config.json of Arcee's AFM: Llama with squared ReLU instead of a gate in the
    MLP."""
    refuse_windows(hf, "the Llama family uses full attention")
    bias = hf.flag("attention_bias", False)
    defaults = FamilyDefaults(kv_heads=None, context_tokens=4096, norm_epsilon=1e-5)
    config = read_decoder(hf, defaults, qkv_bias=bias, output_bias=bias, activation="relu2")
    return replace(config, mlp_bias=hf.flag("mlp_bias", False))


def read_ernie_config(hf: HfConfig) -> DecoderConfig:
    """Reads the config.json of dense ERNIE 4.5: Llama with interleaved rope and one flag for all
    biases."""
    refuse_windows(hf, "the Llama family uses full attention")
    bias = hf.flag("use_bias", False)
    config = read_decoder(hf, ERNIE_DEFAULTS, qkv_bias=bias, output_bias=bias, head_dim_default=128)
    rope = replace(config.attention.rope, interleaved=True)
    return replace(config, attention=replace(config.attention, rope=rope), mlp_bias=bias)


def read_hunyuan_config(hf: HfConfig) -> DecoderConfig:
    """Reads the config.json of dense Hunyuan: Llama with norms of q and k after rope, and a rope
    base that the field `alpha` increases at every context length."""
    refuse_windows(hf, "the Llama family uses full attention")
    field = "rope_scaling" if hf.raw("rope_scaling") else "rope_parameters"
    given = hf.raw(field)
    if isinstance(given, dict) and given.get("alpha"):
        size = hf.count("head_dim", hf.count("hidden_size") // hf.count("num_attention_heads"))
        alpha = checked_number(given["alpha"], None, f"{field}.alpha", hf.where)
        theta = checked_number(given.get("rope_theta"), hf.number("rope_theta", 10000.0), "", "")
        theta *= alpha ** (size / (size - 2))
        hf = hf.changed(rope_scaling=None, rope_parameters=None, rope_theta=theta)
    bias = hf.flag("attention_bias", False)
    defaults = replace(DEFAULTS, norm_epsilon=1e-5)
    config = read_decoder(hf, defaults, qkv_bias=bias, output_bias=bias, qk_norm="head")
    return replace(config, attention=replace(config.attention, norm_after_rope=True))
