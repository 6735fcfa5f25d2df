"""Reads the configuration of Gemma, Gemma 2 and Gemma 3's text model. All have norms that multiply
by one plus the weight, scaled embeddings, and GELU. Gemma 2 and 3 have norms before and after
blocks, and windows in some layers. Gemma 2 bounds scores and logits through a tanh (arXiv
2408.00118). In Gemma 3, layers with a window have other rotary parameters than layers without."""

from dataclasses import replace

from models.decoder_config import DecoderConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, read_layer_types, refuse_windows, with_windows
from models.hf_rope import rope_of

DEFAULTS_1 = FamilyDefaults(kv_heads=16, context_tokens=8192, tied=True)
DEFAULTS_2 = FamilyDefaults(kv_heads=4, context_tokens=8192, tied=True)
DEFAULTS = FamilyDefaults(kv_heads=4, context_tokens=131072, rope_theta=1e6, tied=True)


def read_1_config(hf: HfConfig) -> DecoderConfig:
    """The first published files state the activation "gelu", which transformers reads as the
    approximation by a tanh with which the model was trained."""
    refuse_windows(hf, "this family uses full attention")
    if hf.raw("hidden_act") == "gelu":
        hf = hf.changed(hidden_act=None)
    bias = hf.flag("attention_bias", False)
    config = read_decoder(
        hf,
        DEFAULTS_1,
        qkv_bias=bias,
        output_bias=bias,
        head_dim_default=256,
        activation="gelu_tanh",
    )
    return replace(config, norms_above_one=True, embedding_scale=config.width**0.5)


def read_2_config(hf: HfConfig) -> DecoderConfig:
    """The bounds of scores and logits have defaults, and null disables a bound."""
    hf.pass_over("sliding_window_size")  # published beside `sliding_window` and never used
    config = _read(hf, DEFAULTS_2, pattern=2, bias=hf.flag("attention_bias", False))
    scores, logits = (
        hf.number(field, 0.0 if field in hf.fields else assumed)
        for field, assumed in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0))
    )
    return replace(config, attention=replace(config.attention, cap=scores), logits_cap=logits)


def read_3_config(hf: HfConfig) -> DecoderConfig:
    """Reads the config.json of Gemma 3. In transformers 5 `rope_parameters` has one entry per kind
    of layer. Earlier configs give the rotary parameters only for layers without a window."""
    sizes = {"vocab_size": 262208, "num_attention_heads": 8}
    hf = hf.changed(**{name: hf.count(name, size) for name, size in sizes.items()})
    given, local = hf.raw("rope_parameters"), None
    if isinstance(given, dict) and given.keys() & {"full_attention", "sliding_attention"}:
        local = given.get("sliding_attention")
        hf = hf.changed(rope_parameters=given.get("full_attention"))
    if not isinstance(local, dict | None):
        raise hf.error("rope_parameters", "must be objects by kind of layer", "correct it")
    bias = hf.flag("attention_bias", False)
    config = _read(hf, DEFAULTS, pattern=hf.count("sliding_window_pattern", 6), bias=bias)
    attention = replace(config.attention, qk_norm="head")
    local = {"rope_theta": hf.number("rope_local_base_freq", 10000.0)} | (local or {})
    rope = rope_of(
        hf, "rope_parameters", local, attention.head_dim, config.context_tokens, DEFAULTS
    )
    layers = (replace(each, rope=rope if each.window else None) for each in config.layers)
    # In multimodal models, transformers does not bound logits, even if the text part of the config
    # states a bound.
    cap = 0.0 if hf.nested else config.logits_cap
    return replace(config, attention=attention, layers=tuple(layers), logits_cap=cap)


def _read(hf: HfConfig, defaults: FamilyDefaults, *, pattern: int, bias: bool) -> DecoderConfig:
    config = read_decoder(
        hf, defaults, qkv_bias=bias, output_bias=bias, head_dim_default=256, activation="gelu_tanh"
    )
    numbers = range(1, len(config.layers) + 1)
    windows = read_layer_types(
        hf, len(numbers), hf.count("sliding_window", 4096), [at % pattern != 0 for at in numbers]
    )
    scale = hf.number("query_pre_attn_scalar", 256.0) ** -0.5
    config = replace(
        config,
        attention=replace(config.attention, scale=scale),
        context_tokens=hf.count("max_position_embeddings", defaults.context_tokens),
        norms="both",
        norms_above_one=True,
        embedding_scale=config.width**0.5,
        logits_cap=hf.number("final_logit_softcapping", 0.0),
    )
    return with_windows(config, windows)
