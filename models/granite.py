"""Reads the configuration of Granite 3 and 4, which are Llama with constant factors on embeddings,
residuals, attention scores and logits. Models with experts may have a shared one. Granite swash has
attention sinks, windows in most layers, and a rope base for each layer. Granite 4 models are dense
or hybrid. Hybrids have Mamba-2 in most layers, and optionally routed experts with a shared expert,
and rotary positions."""

from dataclasses import replace

from models import llama
from models.decoder_config import DecoderConfig, ExpertConfig, LayerConfig, MambaConfig
from models.hf_config import FamilyDefaults, HfConfig, checked_number
from models.hf_decoder import read_layer_types, read_window, with_windows
from models.hf_experts import count_experts, with_experts
from models.hf_hybrid import checked_mamba, hybrid_layers, read_kinds

SWA_DEFAULTS = FamilyDefaults(kv_heads=4, context_tokens=8192, norm_epsilon=1e-5, tied=True)
# Fields without effect here: of initialization, of chunking in other implementations, and of Mamba
# in dense models.
_OF_HYBRIDS = (
    "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv",
    "mamba_expand", "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit",
    "time_step_min", "time_step_max", "time_step_floor",
)  # fmt: skip


def read_config(hf: HfConfig, defaults: FamilyDefaults = llama.DEFAULTS) -> DecoderConfig:
    config = llama.read_config(hf, defaults)
    return replace(
        config,
        attention=replace(config.attention, scale=hf.number("attention_multiplier", 1.0)),
        embedding_scale=hf.number("embedding_multiplier", 1.0),
        residual_scale=hf.number("residual_multiplier", 1.0),
        logits_divisor=hf.number("logits_scaling", 1.0),
    )


def read_moe_config(hf: HfConfig) -> DecoderConfig:
    config = read_config(hf)
    count, chosen = count_experts(hf, 8), hf.count("num_experts_per_tok", 2)
    return with_experts(hf, config, ExpertConfig(count, chosen, config.ffn, True))


def read_shared_config(hf: HfConfig) -> DecoderConfig:
    config = read_moe_config(hf)
    shared, experts = hf.count("shared_intermediate_size", 0, least=0), config.experts
    assert experts is not None
    return with_experts(hf, config, replace(experts, shared_ffn=shared))


def read_swa_config(hf: HfConfig) -> DecoderConfig:
    bare = hf.changed(sliding_window=None, layer_types=None)
    return _with_windows(hf, read_config(bare, SWA_DEFAULTS))


def read_moe_swa_config(hf: HfConfig) -> DecoderConfig:
    bare = hf.changed(sliding_window=None, layer_types=None)
    return _with_windows(hf, read_shared_config(bare))


def _with_windows(hf: HfConfig, config: DecoderConfig) -> DecoderConfig:
    """A rope base of 0 means a layer without rotary positions."""
    count, rope = len(config.layers), config.attention.rope
    default = [at % 4 != 0 for at in range(count)]
    config = with_windows(config, read_layer_types(hf, count, read_window(hf, 128), default))
    thetas = hf.raw("layer_rope_theta") or [rope.theta] * count
    if not isinstance(thetas, list) or len(thetas) != count:
        raise hf.error("layer_rope_theta", f"must have a number for each of {count}", "correct it")
    bases = [checked_number(each, 0.0, "layer_rope_theta", hf.where) for each in thetas]
    layers = tuple(
        replace(layer, rope=replace(rope, theta=theta) if theta else None, rotated=theta > 0)
        for layer, theta in zip(config.layers, bases, strict=True)
    )
    return replace(config, layers=layers, attention=replace(config.attention, sinks=True))


def read_4_config(hf: HfConfig) -> DecoderConfig:
    hf = hf.renamed({"layers_block_type": "layer_types"})
    ffn, shared = hf.count("intermediate_size"), hf.count("shared_intermediate_size", 1024)
    if hf.raw("normalization_function") not in (None, "rmsnorm") and not hf.sizes_only:
        raise hf.error("normalization_function", "must be 'rmsnorm'", "others are not supported")
    count, chosen = (count_experts(hf, 8, least=0), hf.count("num_experts_per_tok", 2, least=0))
    if count and not 1 <= chosen <= count:
        raise hf.error("num_experts_per_tok", f"must be 1 to {count}", "correct it")
    experts = ExpertConfig(count, chosen, ffn, True, shared_ffn=shared) if count else None
    config = read_config(hf.changed(intermediate_size=shared, layer_types=None))
    plain = LayerConfig(experts=experts, rotated=hf.raw("position_embedding_type") == "rope")
    kinds = read_kinds(hf, "layer_types", ("mamba", "attention"))
    kinds = kinds or ("mamba",) * len(config.layers)
    if len(kinds) != len(config.layers):
        raise hf.error("layer_types", f"must name {len(config.layers)} layers", "correct it")
    hf.pass_over(*_OF_HYBRIDS)
    mamba = _mamba(hf, config) if "mamba" in kinds else None
    layers = {"attention": plain, "mamba": replace(plain, mamba=mamba)}
    return replace(config, layers=hybrid_layers(hf, "layer_types", kinds, layers))


def _mamba(hf: HfConfig, config: DecoderConfig) -> MambaConfig:
    heads, inner = hf.count("mamba_n_heads", 128), hf.count("mamba_expand", 2) * config.width
    size = inner // heads if hf.raw("mamba_d_head") in (None, "auto") else hf.count("mamba_d_head")
    if heads * size != inner:
        raise hf.error(
            "mamba_n_heads",
            f"times mamba_d_head={size} must be mamba_expand times hidden_size, {inner}",
            "correct it",
        )
    mamba = MambaConfig(
        heads=heads,
        head_dim=size,
        groups=hf.count("mamba_n_groups", 1),
        state_dim=hf.count("mamba_d_state", 256),
        taps=hf.count("mamba_d_conv", 4, least=2),
        convolution_bias=hf.flag("mamba_conv_bias", True),
        bias=hf.flag("mamba_proj_bias", False),
    )
    return checked_mamba(hf, mamba, config.attention.kv_heads, "mamba_n_groups")
