"""Reads the configuration of LFM2 and LFM3. They have gated short convolutions in most layers, and
attention with norms on each head of q and k in the others. Some models of LFM2 have experts, chosen
by corrected sigmoid scores, behind dense first layers. LFM3 has norms before and after blocks, a
gate for each head, and windows and rotary parameters by kind of layer."""

from dataclasses import replace

from models.decoder_config import ConvolutionConfig, DecoderConfig, ExpertConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, read_window, with_ropes, with_windows
from models.hf_experts import count_experts, sparse_layers, with_experts
from models.hf_rope import ropes_by_kind

DEFAULTS = FamilyDefaults(kv_heads=8, context_tokens=128_000, rope_theta=1e6, tied=True)
FULL, WINDOWED, CONVOLUTION = "full_attention", "sliding_attention", "conv"
ROPES_3: dict[str, dict[str, object]] = {
    WINDOWED: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}
# Fields that transformers does not read: duplicates of sizes under other names, and options of
# training.
_PASSED = (
    "block_dim",
    "block_mlp_init_scale",
    "block_norm_eps",
    "block_out_init_scale",
    "block_use_swiglu",
    "block_use_xavier_init",
    "conv_dim",
    "conv_dim_out",
    "conv_use_xavier_init",
    "num_heads",
    "theta",
    "use_pos_enc",
)


def read_config(hf: HfConfig) -> DecoderConfig:
    return replace(_read(hf), ffn=_ffn(hf))


def read_moe_config(hf: HfConfig) -> DecoderConfig:
    config = _read(hf)
    experts = ExpertConfig(
        count_experts(hf, 32),
        hf.count("num_experts_per_tok", 4),
        hf.count("moe_intermediate_size", 1792),
        hf.flag("norm_topk_prob", True),
        scores="sigmoid",
        correction=hf.flag("use_expert_bias", True),
        scaling=hf.number("routed_scaling_factor", 1.0),
        not_zero=1e-6,
    )
    hf = hf.renamed({"num_dense_layers": "first_k_dense_replace"})
    return with_experts(hf, config, experts, sparse_layers(hf, config, 2))


def read_3_config(hf: HfConfig) -> DecoderConfig:
    usual = [
        FULL if at % 4 == 2 else WINDOWED if at % 4 == 0 and at else CONVOLUTION
        for at in range(hf.count("num_hidden_layers"))
    ]
    kinds = hf.names("layer_types") or tuple(usual)
    window = read_window(hf, 256)
    if WINDOWED in kinds and window is None:
        raise hf.error("sliding_window", f"must be set for layers of {WINDOWED}", "set it")
    bias = hf.flag("attention_bias", False)
    config = _read(hf.changed(rope_parameters=None), kinds, taps=7, head_dim=128, bias=bias)
    config = with_windows(config, [window if kind == WINDOWED else None for kind in kinds])
    head_dim, context = config.attention.head_dim, config.context_tokens
    config = with_ropes(config, ropes_by_kind(hf, ROPES_3, head_dim, context, DEFAULTS))
    gates = hf.flag("use_attention_gate", True)
    return replace(
        config,
        attention=replace(config.attention, head_gates=gates),
        norms="both" if hf.flag("use_sandwich_norm", True) else "before",
    )


def _read(
    hf: HfConfig,
    kinds: tuple[str, ...] | None = None,
    *,
    taps: int = 3,
    head_dim: int | None = None,
    bias: bool = False,
) -> DecoderConfig:
    """`kinds` has the kind of each layer of an LFM3."""
    hf.pass_over(*_PASSED)
    if hf.raw("tie_embedding") is not None:
        hf = hf.changed(tie_word_embeddings=hf.flag("tie_embedding", True))
    config = read_decoder(
        hf.changed(layer_types=None),
        DEFAULTS,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        head_dim_default=head_dim,
    )
    heads, kv_heads, count = (
        config.attention.query_heads,
        config.attention.kv_heads,
        len(config.layers),
    )
    if config.width % heads:
        raise hf.error("hidden_size", f"must be a multiple of the {heads} heads", "correct it")
    short = ConvolutionConfig(
        kv_heads, config.width, hf.count("conv_L_cache", taps, least=2), hf.flag("conv_bias", False)
    )
    known = (FULL, CONVOLUTION, *([WINDOWED] if kinds else []))
    kinds = _checked(hf, kinds or _kinds(hf, count), count, known)
    layers = tuple(
        replace(layer, convolution=short if kind == CONVOLUTION else None)
        for layer, kind in zip(config.layers, kinds, strict=True)
    )
    return replace(config, layers=layers, norm_epsilon=hf.number("norm_eps", 1e-5))


def _kinds(hf: HfConfig, count: int) -> tuple[str, ...]:
    full = hf.counts("full_attn_idxs") if hf.has("full_attn_idxs") else tuple(range(count))
    usual = tuple(FULL if at in full else CONVOLUTION for at in range(count))
    return hf.names("layer_types") or usual


def _checked(
    hf: HfConfig, kinds: tuple[str, ...], count: int, known: tuple[str, ...]
) -> tuple[str, ...]:
    if len(kinds) != count or not {*kinds} <= {*known}:
        raise hf.error("layer_types", f"must list {' or '.join(known)} for {count}", "correct it")
    if {*kinds} == {CONVOLUTION}:
        raise hf.error(
            "layer_types",
            "must list a layer with attention",
            "models without one are not supported",
        )
    return kinds


def _ffn(hf: HfConfig) -> int:
    size = hf.count("block_ff_dim", hf.count("intermediate_size", 12288))
    factor, unit = hf.number("block_ffn_dim_multiplier", 1.0), hf.count("block_multiple_of", 256)
    if not hf.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if hf.raw("block_ffn_dim_multiplier") is None and "block_ffn_dim_multiplier" in hf.fields:
        return size
    return -(-int(factor * size) // unit) * unit
