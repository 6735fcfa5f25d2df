"""Reads the configuration of MiMo-V2-Flash. It has windows with attention sinks and twice the kv
heads in most layers, a head size of values that differs from that of keys, rotary positions on a
part of each head, and GLM-4.5's experts without a shared one."""

from dataclasses import replace

from models.decoder_config import DecoderConfig, LayerConfig
from models.glm4_moe import RoutingDefaults, read_experts
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder
from models.hf_rope import rope_of

PART = 0.334
DEFAULTS = FamilyDefaults(kv_heads=4, context_tokens=131072, norm_epsilon=1e-5, partial_rotary=PART)
ROUTING = RoutingDefaults(256, 8, 2048)
FULL, WINDOWED = "full_attention", "sliding_attention"
# Fields of the released checkpoint with a single supported value.
_ONLY: dict[str, object] = {
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
}


def read_config(hf: HfConfig) -> DecoderConfig:
    hf.require(_ONLY)
    if hf.has("layernorm_epsilon"):
        hf = hf.changed(rms_norm_eps=hf.number("layernorm_epsilon", 1e-5))
    ropes = _ropes(hf)
    bias = hf.flag("attention_bias", False)
    plain = hf.changed(rope_parameters=next(iter(ropes.values())))
    config = read_decoder(plain, DEFAULTS, qkv_bias=bias, head_dim_default=192)
    full = replace(
        config.attention,
        value_dim=hf.count("v_head_dim", 128),
        value_scale=hf.number("attention_value_scale", 1.0 if _states_null(hf) else 0.707),
    )
    windowed = replace(full, kv_heads=2 * full.kv_heads, sinks=True)
    _check_windowed(hf, windowed.query_heads, windowed.kv_heads, full.head_dim, full.value_dim)
    rope = {
        kind: rope_of(hf, "rope_parameters", given, full.head_dim, config.context_tokens, DEFAULTS)
        for kind, given in ropes.items()
    }
    kinds = _kinds(hf, len(config.layers))
    if lacking := set(kinds) - rope.keys():
        raise hf.error("rope_parameters", f"must have {', '.join(lacking)}", "correct it")
    usual = windowed if WINDOWED in kinds else full
    window = hf.count("sliding_window", 129)
    if hf.has("sliding_window_size"):  # counts the positions before the token's own
        window = hf.count("sliding_window_size") + 1
    experts = read_experts(hf.changed(n_shared_experts=0), ROUTING)
    layers = tuple(
        LayerConfig(
            window if kind == WINDOWED else None,
            experts if sparse else None,
            rope=rope[kind],
            attention=full if kind == FULL and usual is windowed else None,
        )
        for kind, sparse in zip(kinds, _sparse(hf, len(kinds)), strict=True)
    )
    return replace(config, attention=usual, layers=layers)


def _states_null(hf: HfConfig) -> bool:
    return "attention_value_scale" in hf.fields and not hf.has("attention_value_scale")


def _ropes(hf: HfConfig) -> dict[str, dict[str, object]]:
    given = hf.raw("rope_parameters")
    if isinstance(given, dict) and given.keys() & {FULL, WINDOWED}:
        found = {kind: given.get(kind) for kind in (FULL, WINDOWED)}
    elif given is None:
        part = hf.number("partial_rotary_factor", PART)
        thetas = {FULL: hf.number("rope_theta", 5e6), WINDOWED: hf.number("swa_rope_theta", 1e4)}
        found = {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": part}
            for kind, theta in thetas.items()
        }
    else:
        found = {}
    if hf.raw("rope_scaling") and not hf.sizes_only:
        raise hf.error("rope_scaling", "must be null", "use rope_parameters by kind of layer")
    ropes = {kind: each for kind, each in found.items() if isinstance(each, dict)}
    if not ropes:
        raise hf.error(
            "rope_parameters", f"must be objects under {FULL} and {WINDOWED}", "correct it"
        )
    return ropes


def _check_windowed(hf: HfConfig, heads: int, kv_heads: int, head_dim: int, value_dim: int) -> None:
    sizes = {
        "swa_num_attention_heads": heads,
        "swa_num_key_value_heads": kv_heads,
        "swa_head_dim": head_dim,
        "swa_v_head_dim": value_dim,
    }
    for field, size in sizes.items():
        if hf.count(field, size) != size:
            raise hf.error(field, f"must be {size}", "other sizes are not supported")
    if heads % kv_heads:
        raise hf.error(
            "num_key_value_heads", f"must divide num_attention_heads={heads} twice", "correct it"
        )


def _kinds(hf: HfConfig, count: int) -> tuple[str, ...]:
    kinds = hf.names("layer_types")
    pattern = hf.counts("hybrid_layer_pattern")
    hf.pass_over("attention_chunk_size")  # equals the window and is not read
    if kinds is None and pattern:
        kinds = tuple(WINDOWED if each else FULL for each in pattern)
    if kinds is None:
        kinds = tuple(FULL if at == 0 or (at + 1) % 6 == 0 else WINDOWED for at in range(count))
    if len(kinds) != count or any(kind not in (FULL, WINDOWED) for kind in kinds):
        raise hf.error("layer_types", f"must list {FULL} or {WINDOWED} for {count}", "correct it")
    return kinds


def _sparse(hf: HfConfig, count: int) -> tuple[bool, ...]:
    stated = hf.counts("moe_layer_freq") if isinstance(hf.raw("moe_layer_freq"), list) else ()
    kinds = hf.names("mlp_layer_types")
    if kinds is None:
        stated = stated or (0, *(1,) * (count - 1))
        kinds = tuple("sparse" if each else "dense" for each in stated)
    if len(kinds) != count or any(kind not in ("dense", "sparse") for kind in kinds):
        raise hf.error("mlp_layer_types", f"must list dense or sparse for {count}", "correct it")
    return tuple(kind == "sparse" for kind in kinds)
