"""Reads the configuration of Llama 2 and 3.x, and of other models of the same form: optional biases
on all projections, one head size, no window. Arcee's AFM, ERNIE 4.5, Hunyuan (dense), InternLM3,
IQuest-Coder and CWM differ from Llama by one option or by defaults."""

from dataclasses import replace

from models.decoder_config import DecoderConfig
from models.hf_config import FamilyDefaults, HfConfig, checked_number
from models.hf_decoder import (
    read_decoder,
    read_layer_types,
    read_window,
    refuse_windows,
    with_windows,
)

DEFAULTS = FamilyDefaults(kv_heads=None, context_tokens=2048)
ERNIE_DEFAULTS = FamilyDefaults(
    kv_heads=2, context_tokens=131072, norm_epsilon=1e-5, rope_theta=500000.0, tied=True
)
INTERN_DEFAULTS = FamilyDefaults(kv_heads=2, context_tokens=32768, norm_epsilon=1e-5)
IQUEST_DEFAULTS = FamilyDefaults(kv_heads=8, context_tokens=131072, norm_epsilon=1e-5)
CWM_DEFAULTS = replace(IQUEST_DEFAULTS, rope_theta=1e6)
CWM_ROPE: dict[str, object] = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read_config(
    hf: HfConfig, defaults: FamilyDefaults = DEFAULTS, head_dim: int | None = None
) -> DecoderConfig:
    """`head_dim` is the default of the field."""
    refuse_windows(hf, "the Llama family uses full attention")
    bias = hf.flag("attention_bias", False)
    config = read_decoder(
        hf, defaults, qkv_bias=bias, output_bias=bias, head_dim_default=_head_dim(hf, head_dim)
    )
    return replace(config, mlp_bias=hf.flag("mlp_bias", False))


def _head_dim(hf: HfConfig, default: int | None) -> int | None:
    return None if "head_dim" in hf.fields else default  # null means width / heads


def read_intern_config(hf: HfConfig) -> DecoderConfig:
    """Reads the config.json of InternLM3. Its published form has one flag for the biases of q, k
    and v, and another for all other biases."""
    hf = hf.renamed({"qkv_bias": "attention_bias", "bias": "mlp_bias"})
    config, bias = read_config(hf, INTERN_DEFAULTS, 128), hf.flag("mlp_bias", False)
    return replace(config, attention=replace(config.attention, output_bias=bias))


def read_iquest_config(hf: HfConfig) -> DecoderConfig:
    return read_config(hf, IQUEST_DEFAULTS, 128)


def read_cwm_config(hf: HfConfig) -> DecoderConfig:
    """Reads the config.json of CWM: Llama 3 with windows in three of four layers."""
    if not (hf.has("rope_scaling") or hf.has("rope_parameters")):
        hf = hf.changed(rope_parameters=CWM_ROPE)
    config = read_decoder(hf, CWM_DEFAULTS, head_dim_default=_head_dim(hf, 128))
    count = len(config.layers)
    default = [at % 4 != 0 for at in range(count)]
    windows = read_layer_types(hf, count, read_window(hf, 8192), default)
    return replace(with_windows(config, windows), mlp_bias=hf.flag("mlp_bias", False))


def read_arcee_config(hf: HfConfig) -> DecoderConfig:
    """Reads the config.json of Arcee's AFM: Llama with squared ReLU instead of a gate in the
    MLP."""
    refuse_windows(hf, "the Llama family uses full attention")
    bias = hf.flag("attention_bias", False)
    defaults = FamilyDefaults(kv_heads=None, context_tokens=4096, norm_epsilon=1e-5)
    config = read_decoder(hf, defaults, qkv_bias=bias, output_bias=bias, activation="relu2")
    return replace(config, mlp_bias=hf.flag("mlp_bias", False))


def read_ernie_config(
    hf: HfConfig, defaults: FamilyDefaults = ERNIE_DEFAULTS, head_dim: int | None = 128
) -> DecoderConfig:
    """Reads the config.json of dense ERNIE 4.5: Llama with interleaved rope and one flag for all
    biases. Models with experts have heads of width / heads by default."""
    refuse_windows(hf, "the Llama family uses full attention")
    bias = hf.flag("use_bias", False)
    config = read_decoder(hf, defaults, qkv_bias=bias, output_bias=bias, head_dim_default=head_dim)
    rope = replace(config.attention.rope, interleaved=True)
    return replace(config, attention=replace(config.attention, rope=rope), mlp_bias=bias)


# Fields of Hunyuan's published files with a single supported value, and fields that nothing reads.
_HUNYUAN_ONLY = {"use_qk_norm": True, "use_rotary_pos_emb": True, "norm_type": "rms"}
_HUNYUAN_PASSED = (
    "cla_share_factor", "dense_list", "im_start_id", "im_end_id", "im_newline_id", "image_token_id",
    "mask_init_id", "org_vocab_size", "pad_id", "pool_type", "text_start_id", "text_end_id",
    "video_start_id", "video_end_id",
)  # fmt: skip


def read_hunyuan_config(hf: HfConfig) -> DecoderConfig:
    """Reads the config.json of dense Hunyuan: Llama with norms of q and k after rope, and a rope
    base that the field `alpha` increases at every context length."""
    refuse_windows(hf, "the Llama family uses full attention")
    hf.require(_HUNYUAN_ONLY)
    hf.pass_over(*_HUNYUAN_PASSED)
    hf = hf.renamed({"attention_head_dim": "head_dim"})
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
