"""Reads the configuration of Qwen3-Next, Qwen3.5 and Qwen3.6. Most layers are Gated DeltaNet. The
other layers have attention with an output gate, norms on each head of q and k, and rotary positions
on a part of each head. Norms multiply by one plus the weight. Only the text part of Qwen3.5 is
served. For text, three-dimensional rotary positions equal ordinary ones."""

from dataclasses import replace

from models.decoder_config import DecoderConfig, DeltaConfig, ExpertConfig, LayerConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder
from models.hf_experts import count_experts
from models.qwen3_moe import with_sparse_layers

NEXT = FamilyDefaults(kv_heads=2, context_tokens=32768, partial_rotary=0.25)
DENSE = replace(NEXT, kv_heads=4)
KINDS = ("linear_attention", "full_attention")


def read_config(hf: HfConfig) -> DecoderConfig:
    config = _read(hf, NEXT)
    experts = _experts(hf, 512, 10, hf.flag("norm_topk_prob", True))
    return with_sparse_layers(hf, config, experts)


def read_dense_config(hf: HfConfig) -> DecoderConfig:
    return _read(hf, DENSE)


def read_moe_config(hf: HfConfig) -> DecoderConfig:
    config = _read(hf, NEXT, ffn_default=1)  # no layer is dense
    experts = _experts(hf, 256, 8, True)
    return with_sparse_layers(hf, config, experts)


def _read(hf: HfConfig, defaults: FamilyDefaults, ffn_default: int | None = None) -> DecoderConfig:
    if hf.flag("attention_bias", False):
        raise hf.error("attention_bias", "must be false", "biases are not supported here")
    if not hf.flag("attn_output_gate", True):
        raise hf.error("attn_output_gate", "must be true", "ungated attention is not supported")
    hf.pass_over("mamba_ssm_dtype")  # states are always float32
    if hf.flag("mtp_use_dedicated_embeddings", False) and not hf.sizes_only:
        raise hf.error("mtp_use_dedicated_embeddings", "must be false", "use another checkpoint")
    if hf.raw("output_gate_type") not in (None, "silu", "swish") and not hf.sizes_only:
        # Qwen3.8 states the gate of the delta net's norm.
        raise hf.error("output_gate_type", "must be 'silu' or 'swish'", "use another checkpoint")
    config = read_decoder(
        hf, defaults, qk_norm="head", head_dim_default=256, ffn_default=ffn_default
    )
    delta = DeltaConfig(
        key_heads=hf.count("linear_num_key_heads", 16),
        value_heads=hf.count("linear_num_value_heads", 32),
        key_dim=hf.count("linear_key_head_dim", 128),
        value_dim=hf.count("linear_value_head_dim", 128),
        taps=hf.count("linear_conv_kernel_dim", 4, least=2),
    )
    if delta.value_heads % delta.key_heads:
        raise hf.error(
            "linear_num_value_heads",
            f"must be a multiple of linear_num_key_heads={delta.key_heads}",
            "correct it",
        )
    kinds = _kinds(hf, len(config.layers))
    return replace(
        config,
        attention=replace(config.attention, gated=True),
        layers=tuple(LayerConfig(delta=delta if kind == KINDS[0] else None) for kind in kinds),
        norms_above_one=True,
        mtp_aside=True,
        left_aside=hf.count("mtp_num_hidden_layers", 1, least=0),
    )


def _kinds(hf: HfConfig, layers: int) -> tuple[str, ...]:
    every = hf.count("full_attention_interval", 4)
    kinds = hf.names("layer_types")
    if kinds is None:
        return tuple(KINDS[(index + 1) % every == 0] for index in range(layers))
    if len(kinds) != layers or any(kind not in KINDS for kind in kinds):
        raise hf.error(
            "layer_types", f"must name {layers} layers, each {' or '.join(KINDS)}", "correct it"
        )
    if KINDS[1] not in kinds:
        raise hf.error("layer_types", "must list a layer with full_attention", "correct it")
    return kinds


def _experts(hf: HfConfig, experts: int, chosen: int, normalised: bool) -> ExpertConfig | None:
    total = count_experts(hf, experts, least=0)
    if not total:
        return None
    return ExpertConfig(
        total,
        hf.count("num_experts_per_tok", chosen),
        hf.count("moe_intermediate_size", 512),
        normalised,
        shared_ffn=hf.count("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )
