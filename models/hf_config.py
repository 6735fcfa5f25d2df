"""Reads a Hugging Face config.json: typed fields with the defaults of its family, and refusal of
what we do not have.

Nothing that would change the model's output is ignored: an option outside what we support is
refused by name, value and remedy. Fields follow transformers 5 (`rope_parameters`) and 4
(`rope_scaling`, `rope_theta`)."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from jdisagg.errors import CheckpointError
from jdisagg.ops.rope_frequencies import Rope
from models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig
from models.model_folder import check_model_folder

_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")

# Options of some family that change the output and that none of ours has: refused unless absent,
# null, false, zero or empty.
_UNSUPPORTED = (
    "quantization_config",
    "quantization",
    "compression_config",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "logit_scale",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "clip_qkv",
    "use_parallel_residual",
    "parallel_attn",
    "alibi",
    "cross_attention_layers",
    "add_cross_attention",
    "is_encoder_decoder",
    "vision_config",
    "audio_config",
    "no_rope_layers",
    "attention_chunk_size",
    "num_shared_experts",
    "n_shared_experts",
    "shared_expert_intermediate_size",
    "scale_embedding",
    "tie_encoder_decoder",
    "attention_sinks",
    "scale_depth",
    "use_mrope",
    "llama_4_scaling",
)


@dataclass(frozen=True, slots=True)
class FamilyDefaults:
    """What transformers assumes where config.json is silent."""

    kv_heads: int | None
    context_tokens: int
    norm_epsilon: float = 1e-6
    rope_theta: float = 10000.0


class HfConfig:
    """The fields of one config.json; each reader checks the type and names the field on error."""

    def __init__(
        self, fields: Mapping[str, object], where: str = "config.json", *, sizes_only: bool = False
    ) -> None:
        """`sizes_only`: what a model costs is asked, and options that we lack are passed over."""
        self.fields: Mapping[str, object] = fields  # null ones included
        self.where = where
        self.sizes_only = sizes_only

    @classmethod
    def from_directory(cls, directory: Path, *, sizes_only: bool = False) -> "HfConfig":
        path = directory / "config.json"
        check_model_folder(directory)
        if not path.is_file():
            raise CheckpointError(
                f"model directory {str(directory)!r} has no config.json; give a Hugging Face or"
                " converted directory"
            )
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is not valid JSON ({error}); fetch it again") from error
        if not isinstance(fields, dict):
            raise CheckpointError(
                f"{path} must hold a JSON object, got {type(fields).__name__}; fetch it again"
            )
        return cls(fields, str(path), sizes_only=sizes_only)

    def error(self, field: str, rule: str, remedy: str) -> CheckpointError:
        return CheckpointError(
            f"{self.where}: {field} {rule}, got {self.fields.get(field)!r}; {remedy}"
        )

    def has(self, field: str) -> bool:
        return self.fields.get(field) is not None

    def raw(self, field: str) -> object:
        return self.fields.get(field)

    def count(self, field: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer; without a default the field is required. A null counts as absent."""
        value = self.fields.get(field)
        if value is None:
            if default is None:
                raise CheckpointError(
                    f"{self.where}: needed field {field!r} is missing; take it from the model's"
                    " published config.json"
                )
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(field, f"must be an integer of at least {least}", "correct it")
        return value

    def number(self, field: str, default: float) -> float:
        return _number(self.fields.get(field), default, field, self.where)

    def flag(self, field: str, default: bool) -> bool:
        value = self.fields.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(field, "must be true or false", "correct it")
        return value

    def counts(self, field: str) -> tuple[int, ...]:
        """A list of integers; empty where absent."""
        value = self.fields.get(field)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(
            isinstance(item, int) and not isinstance(item, bool) for item in value
        ):
            raise self.error(field, "must be a list of integers", "correct it")
        return tuple(value)

    def names(self, field: str) -> tuple[str, ...] | None:
        """A list of strings; None where absent."""
        value = self.fields.get(field)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(field, "must be a list of strings", "correct it")
        return tuple(value)

    def refuse(self, field: str, reason: str) -> None:
        """Refuses a field that says anything (null, false, 0, 1.0 of a scale it is not: only null,
        false, 0 and empty pass)."""
        if self.fields.get(field) and not self.sizes_only:
            raise self.error(field, f"is not supported ({reason})", "use a checkpoint without it")


def read_decoder(
    hf: HfConfig,
    defaults: FamilyDefaults,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
    head_dim_default: int | None = None,
) -> DecoderConfig:
    """The fields that all families share; all layers dense and without a window, for the family's
    file to `replace`."""
    for field in _UNSUPPORTED:
        hf.refuse(field, "no family here has it")
    activation = hf.raw("hidden_act") or "silu"
    if activation not in ("silu", "swish") and not hf.sizes_only:
        raise hf.error("hidden_act", "must be 'silu'", "other activations are not supported")
    width, heads = hf.count("hidden_size"), hf.count("num_attention_heads")
    kv_heads = hf.count("num_key_value_heads", _kv_heads_default(hf, heads, defaults))
    if heads % kv_heads:
        raise hf.error(
            "num_key_value_heads", f"must divide num_attention_heads={heads}", "correct it"
        )
    head_dim = hf.count("head_dim", head_dim_default or max(1, width // heads))
    if head_dim % 2:
        raise CheckpointError(
            f"{hf.where}: head_dim must be even for rotary positions, got {head_dim}; correct it"
        )
    context = hf.count("max_position_embeddings", defaults.context_tokens)
    try:
        rope = read_rope(hf, head_dim, context, defaults)
    except CheckpointError:
        if not hf.sizes_only:
            raise
        rope = Rope(head_dim, defaults.rope_theta)
    return DecoderConfig(
        family=str(hf.raw("model_type")),
        vocabulary=hf.count("vocab_size"),
        width=width,
        ffn=hf.count("intermediate_size"),
        attention=AttentionConfig(heads, kv_heads, head_dim, rope, qkv_bias, output_bias, qk_norm),
        layers=(LayerConfig(),) * hf.count("num_hidden_layers"),
        norm_epsilon=hf.number("rms_norm_eps", defaults.norm_epsilon),
        tied=hf.flag("tie_word_embeddings", False),
        context_tokens=_extended_context(context, rope),
    )


def with_windows(config: DecoderConfig, windows: tuple[int | None, ...]) -> DecoderConfig:
    return replace(
        config,
        layers=tuple(
            replace(layer, window=window)
            for layer, window in zip(config.layers, windows, strict=True)
        ),
    )


def read_rope(hf: HfConfig, head_dim: int, context: int, defaults: FamilyDefaults) -> Rope:
    """From `rope_scaling` (which wins where both are set, as in transformers) or `rope_parameters`,
    and the top-level `rope_theta`."""
    field = "rope_scaling" if hf.raw("rope_scaling") else "rope_parameters"
    given = hf.raw(field) or {}
    if not isinstance(given, dict):
        raise hf.error(field, "must be an object", "correct it")
    for key, value in given.items():
        if isinstance(value, dict):
            raise hf.error(
                field,
                f"must be one set of parameters, but {key!r} holds another",
                "per-layer rope is not supported",
            )
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in _ROPE_TYPES:
        raise hf.error(
            field,
            f"has rope_type {kind!r}, which is not one of {', '.join(_ROPE_TYPES)}",
            "use a checkpoint without it",
        )
    if (
        _number(
            given.get("partial_rotary_factor", hf.raw("partial_rotary_factor")),
            1.0,
            "partial_rotary_factor",
            hf.where,
        )
        != 1.0
    ):
        raise CheckpointError(
            f"{hf.where}: partial_rotary_factor is not supported (whole heads are rotated); remove"
            " it or set it to 1"
        )

    def number(key: str, default: float | None = None) -> float:
        return _number(given.get(key), default, f"{field}.{key}", hf.where)

    original = (
        hf.raw("original_max_position_embeddings")
        or given.get("original_max_position_embeddings")
        or context
    )
    original = int(_number(original, None, "original_max_position_embeddings", hf.where))
    rope = Rope(head_dim, number("rope_theta", hf.number("rope_theta", defaults.rope_theta)))
    match kind:
        case "linear":
            rope = replace(rope, type="linear", factor=number("factor"))
        case "dynamic":
            rope = replace(rope, type="dynamic", factor=number("factor"), original_tokens=context)
        case "llama3":
            low, high = number("low_freq_factor"), number("high_freq_factor")
            if not high > low:
                raise hf.error(
                    field, "must have high_freq_factor above low_freq_factor", "correct it"
                )
            rope = replace(
                rope,
                type="llama3",
                factor=number("factor"),
                original_tokens=original,
                low_frequency_factor=low,
                high_frequency_factor=high,
            )
        case "yarn":
            factor = number("factor", context / original)
            truncate = given.get("truncate", True)
            rope = replace(
                rope,
                type="yarn",
                factor=factor,
                original_tokens=original,
                beta_fast=number("beta_fast", 32.0) or 32.0,
                beta_slow=number("beta_slow", 1.0) or 1.0,
                truncate=bool(truncate),
                attention_factor=_yarn_attention_factor(
                    factor,
                    number("attention_factor", math.nan),
                    number("mscale", 0.0),
                    number("mscale_all_dim", 0.0),
                ),
            )
    if rope.factor <= 0 or rope.theta <= 0 or rope.original_tokens < 0:
        raise hf.error(
            field,
            "must have a positive factor, rope_theta and original_max_position_embeddings",
            "correct it",
        )
    return rope


def _yarn_attention_factor(
    factor: float, given: float, mscale: float, mscale_all_dim: float
) -> float:
    """Equation 22 of the YaRN paper, with DeepSeek's pair of scales."""
    if not math.isnan(given):
        return given

    def temperature(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return (
        temperature(mscale) / temperature(mscale_all_dim)
        if mscale and mscale_all_dim
        else temperature(1.0)
    )


def _extended_context(context: int, rope: Rope) -> int:
    """The longest sequence: linear and dynamic stretch max_position_embeddings, yarn its original
    context; llama3 states the result."""
    match rope.type:
        case "linear" | "dynamic":
            return max(context, int(context * rope.factor))
        case "yarn":
            return max(context, int(rope.original_tokens * rope.factor))
        case _:
            return context


def _kv_heads_default(hf: HfConfig, heads: int, defaults: FamilyDefaults) -> int:
    """A null means one kv head per query head; an absent field means the family's default."""
    explicit_null = "num_key_value_heads" in hf.fields
    return heads if explicit_null or defaults.kv_heads is None else defaults.kv_heads


def _number(value: object, default: float | None, name: str, where: str) -> float:
    if value is None:
        if default is None:
            raise CheckpointError(
                f"{where}: needed field {name!r} is missing; take it from the model's published"
                " config.json"
            )
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise CheckpointError(f"{where}: {name} must be a finite number, got {value!r}; correct it")
    return float(value)
