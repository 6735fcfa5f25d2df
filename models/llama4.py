"""Reads the configuration of Llama 4 (text part). Three of four layers have rotary positions and
attend only within chunks of 8,192 positions. The other layers have no rotary positions and attend
to all positions. Each token uses one routed expert, whose input is scaled, and a shared expert.

The model is served only up to the size of a chunk. Within one chunk, attention in chunks equals
full attention."""

from dataclasses import replace

from models.decoder_config import DecoderConfig, ExpertConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder

DEFAULTS = FamilyDefaults(
    kv_heads=8, context_tokens=4096 * 32, norm_epsilon=1e-5, rope_theta=500000.0
)
CHUNKED, FULL = "chunked_attention", "full_attention"


def read_config(hf: HfConfig) -> DecoderConfig:
    bias = hf.flag("attention_bias", False)
    plain = hf.changed(intermediate_size=hf.count("intermediate_size_mlp", 16384))
    config = read_decoder(plain, DEFAULTS, qkv_bias=bias, output_bias=bias, head_dim_default=128)
    count, interval = len(config.layers), hf.count("no_rope_layer_interval", 4)
    rotated = [bool(turn) for turn in hf.counts("no_rope_layers")]
    rotated = rotated or [at % interval != 0 for at in range(1, count + 1)]
    if len(rotated) < count:
        raise hf.error("no_rope_layers", f"must name {count} layers", "correct it")
    experts, sparse = _experts(hf), _sparse(hf, count)
    attention = replace(
        config.attention,
        rope=replace(config.attention.rope, interleaved=True),
        qk_norm="unit" if hf.flag("use_qk_norm", True) else "",
        growth=_growth(hf),
    )
    layers = tuple(
        replace(layer, rotated=rotated[at], experts=experts if at in sparse else None)
        for at, layer in enumerate(config.layers)
    )
    context = min(config.context_tokens, _chunk(hf, rotated[:count]))
    return replace(config, attention=attention, layers=layers, context_tokens=context)


def _growth(hf: HfConfig) -> tuple[float, int] | None:
    """Some published configs state a number instead of true."""
    stated = hf.raw("attn_temperature_tuning")
    growth = hf.number("attn_scale", 0.1), hf.count("floor_scale", 8192)
    return growth if stated is None or stated else None


def _experts(hf: HfConfig) -> ExpertConfig:
    chosen, ffn = hf.count("num_experts_per_tok", 1), hf.count("intermediate_size", 8192)
    if chosen != 1 and not hf.sizes_only:
        raise hf.error(
            "num_experts_per_tok", "must be 1", "scaled inputs of several experts are not supported"
        )
    return ExpertConfig(
        hf.count("num_local_experts", 16),
        chosen,
        ffn,
        normalised=False,
        shared_ffn=ffn,
        scores="sigmoid",
        scaled_inputs=True,
    )


def _sparse(hf: HfConfig, count: int) -> tuple[int, ...]:
    step = hf.count("interleave_moe_layer_step", 1, least=0)
    stated = hf.counts("moe_layers")
    if hf.has("moe_layers") or not step:
        return stated
    return tuple(range(step - 1, count, step))


def _chunk(hf: HfConfig, rotated: list[bool]) -> int:
    kinds = hf.names("layer_types")
    size = hf.raw("attention_chunk_size") if "attention_chunk_size" in hf.fields else 8192
    if kinds is None:
        kinds = tuple(CHUNKED if turn and size is not None else FULL for turn in rotated)
    if len(kinds) != len(rotated) or any(kind not in (CHUNKED, FULL) for kind in kinds):
        raise hf.error(
            "layer_types", f"must list {CHUNKED} or {FULL} for {len(rotated)} layers", "correct it"
        )
    return hf.count("attention_chunk_size", 8192) if CHUNKED in kinds else 1 << 30
