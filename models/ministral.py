"""Reads the configuration of Ministral and Devstral 2. Ministral 8B (2024) is Mistral with windows
in some layers. Ministral 3 and Devstral 2 are Mistral with queries that are scaled by their
position."""

from dataclasses import replace

from models.decoder_config import DecoderConfig
from models.hf_config import FamilyDefaults, HfConfig, checked_number
from models.hf_decoder import read_decoder, read_layer_types, read_window, with_windows

DEFAULTS = FamilyDefaults(kv_heads=8, context_tokens=4096 * 32)
DEFAULTS_3 = FamilyDefaults(kv_heads=8, context_tokens=262144, norm_epsilon=1e-5, rope_theta=1e6)
ROPE_3: dict[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read_config(hf: HfConfig) -> DecoderConfig:
    config = read_decoder(hf, DEFAULTS)
    count = len(config.layers)
    return with_windows(config, read_layer_types(hf, count, read_window(hf, 4096), [True] * count))


def read_3_config(hf: HfConfig) -> DecoderConfig:
    hf, beta = without_query_growth(hf, ROPE_3)
    config = with_query_growth(read_decoder(hf, DEFAULTS_3, head_dim_default=128), beta, hf)
    return with_windows(config, (read_window(hf),) * len(config.layers))


def without_query_growth(
    hf: HfConfig, assumed: dict[str, object], *passed_over: str
) -> tuple[HfConfig, float]:
    """Returns a config whose rotary parameters lack the factor by which queries grow with their
    position, and also the fields `passed_over`. Also returns the factor, 0 if absent. `assumed`
    replaces missing rotary parameters."""
    field = "rope_scaling" if hf.raw("rope_scaling") else "rope_parameters"
    given = hf.raw(field) or assumed
    if not isinstance(given, dict):
        raise hf.error(field, "must be an object", "correct it")
    beta = checked_number(given.get("llama_4_scaling_beta"), 0.0, f"{field}.beta", hf.where)
    without = ("llama_4_scaling_beta", *passed_over)
    rest = {key: value for key, value in given.items() if key not in without}
    return hf.changed(**{field: rest}), beta


def with_query_growth(config: DecoderConfig, beta: float, hf: HfConfig) -> DecoderConfig:
    """Raises CheckpointError if the config lacks the original context length, which the growth
    depends on."""
    rope = replace(config.attention.rope, query_beta=beta)
    if beta and not rope.original_tokens:
        field = "rope_scaling" if hf.raw("rope_scaling") else "rope_parameters"
        raise hf.error(field, "must have original_max_position_embeddings", "correct it")
    return replace(config, attention=replace(config.attention, rope=rope))
