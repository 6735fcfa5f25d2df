"""Granite 3 and 4, dense: Llama with scales on embeddings, residuals, attention scores and logits.
Granite 4's dense models come in the form of its hybrids, without experts and without Mamba."""

from dataclasses import replace

from models import llama
from models.decoder_config import DecoderConfig
from models.hf_config import HfConfig

_OF_HYBRIDS = (
    "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv",
    "mamba_expand", "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit",
    "time_step_min", "time_step_max", "time_step_floor", "num_experts_per_tok", "intermediate_size",
)  # fmt: skip


def read_config(hf: HfConfig) -> DecoderConfig:
    config = llama.read_config(hf)
    return replace(
        config,
        attention=replace(config.attention, scale=hf.number("attention_multiplier", 1.0)),
        embedding_scale=hf.number("embedding_multiplier", 1.0),
        residual_scale=hf.number("residual_multiplier", 1.0),
        logits_divisor=hf.number("logits_scaling", 1.0),
    )


def read_dense_4_config(hf: HfConfig) -> DecoderConfig:
    hf.count("intermediate_size")
    layers = hf.count("num_hidden_layers")
    kinds = hf.names("layer_types") or ("linear_attention",) * layers
    if any(kind not in ("attention", "full_attention") for kind in kinds) and not hf.sizes_only:
        raise hf.error("layer_types", "must be attention throughout", "Mamba is not supported")
    if hf.count("num_local_experts", 8, least=0) and not hf.sizes_only:
        raise hf.error("num_local_experts", "must be 0", "experts are not supported in this family")
    hf.pass_over(*_OF_HYBRIDS)
    if hf.raw("normalization_function") not in (None, "rmsnorm") and not hf.sizes_only:
        raise hf.error("normalization_function", "must be 'rmsnorm'", "others are not supported")
    ffn = hf.count("shared_intermediate_size", 1024)
    config = read_config(hf.changed(intermediate_size=ffn, layer_types=None))
    rotated = hf.raw("position_embedding_type") == "rope"
    return replace(config, layers=tuple(replace(x, rotated=rotated) for x in config.layers))
