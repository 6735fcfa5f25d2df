"""Rotary positions of a config.json, in the forms of transformers 5 (`rope_parameters`) and 4
(`rope_scaling`, `rope_theta`).

`dynamic` and `longrope` change the rotation of all positions, cached ones included, once a sequence
exceeds the original context. transformers and vLLM handle such sequences differently. These models
are served only up to their original context, where both agree. Longer sequences are refused."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from jdisagg.errors import CheckpointError
from jdisagg.ops.rope_frequencies import Rope
from models.hf_config import FamilyDefaults, HfConfig, checked_number
from models.hf_fields import names, short

_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
# All known fields of a set of rotary parameters. As in transformers, fields that the set's type
# does not use have no effect.
_KNOWN = names("""
    rope_type type rope_theta factor original_max_position_embeddings max_position_embeddings
    attention_factor beta_fast beta_slow short_factor long_factor low_freq_factor high_freq_factor
    mscale mscale_all_dim truncate partial_rotary_factor mrope_section mrope_interleaved
    finetuned
""")


def read_rope(hf: HfConfig, head_dim: int, context: int, defaults: FamilyDefaults) -> Rope:
    """Reads the rotary parameters from `rope_scaling` (which takes precedence, as in transformers)
    or `rope_parameters`, and from the top-level `rope_theta`."""
    field = "rope_scaling" if hf.raw("rope_scaling") else "rope_parameters"
    hf.raw("rope_parameters")
    given = hf.raw(field) or {}
    return rope_of(hf, field, given, head_dim, context, defaults)


def ropes_by_kind(
    hf: HfConfig,
    usual: Mapping[str, Mapping[str, object]],
    head_dim: int | Mapping[str, int],
    context: int,
    defaults: FamilyDefaults,
) -> dict[str, Rope]:
    """Reads `rope_parameters` with a set of parameters for each kind of layer. `usual` has the sets
    that transformers assumes for absent ones."""
    given = hf.raw("rope_parameters") or {}
    if hf.raw("rope_scaling"):
        raise hf.error("rope_scaling", "must not be set", "use rope_parameters by kind of layer")
    if not isinstance(given, dict) or not given.keys() <= usual.keys():
        raise hf.error("rope_parameters", f"must be objects under {', '.join(usual)}", "correct it")
    ropes: dict[str, Rope] = {}
    for kind, assumed in usual.items():
        own = given.get(kind) or assumed
        if not isinstance(own, dict) or "rope_theta" not in own:
            raise hf.error(
                "rope_parameters", f"must have an object with rope_theta under {kind}", "correct it"
            )
        size = head_dim if isinstance(head_dim, int) else head_dim[kind]
        ropes[kind] = rope_of(hf, f"rope_parameters.{kind}", own, size, context, defaults)
    return ropes


def rope_of(
    hf: HfConfig, field: str, given: object, head_dim: int, context: int, defaults: FamilyDefaults
) -> Rope:
    def wrong(rule: str, remedy: str = "correct it") -> CheckpointError:
        return CheckpointError(f"{hf.where}: {field} {rule}; {remedy}")

    if not isinstance(given, dict):
        raise wrong(f"must be an object, got {short(given)}")

    def number(key: str, default: float | None = None) -> float:
        return checked_number(given.get(key), default, f"{field}.{key}", hf.where)

    kind = _kind(given, wrong)
    if kind == "proportional":
        return _proportional(hf, number, head_dim, defaults)
    rotated = _rotated(number("partial_rotary_factor", 0.0), hf, head_dim, defaults)
    original = (
        hf.raw("original_max_position_embeddings")
        or given.get("original_max_position_embeddings")
        or context
    )
    original = int(checked_number(original, None, "original_max_position_embeddings", hf.where))
    rope = Rope(rotated, number("rope_theta", hf.number("rope_theta", defaults.rope_theta)))
    match kind:
        case "linear":
            rope = replace(rope, type="linear", factor=number("factor"))
        case "dynamic":
            number("factor")  # applies only beyond the original context
        case "llama3":
            low, high = number("low_freq_factor"), number("high_freq_factor")
            if not high >= low:
                raise wrong("must have high_freq_factor of at least low_freq_factor")
            rope = replace(
                rope,
                type="llama3",
                factor=number("factor"),
                original_tokens=original,
                low_frequency_factor=low,
                high_frequency_factor=high,
            )
        case "longrope":
            rope = replace(
                rope,
                type="longrope",
                original_tokens=original,
                divisors=_divisors(given.get("short_factor"), rotated // 2, wrong),
                attention_factor=_longrope_attention_factor(
                    number("factor", context / original),
                    original,
                    number("attention_factor", math.nan),
                ),
            )
        case "yarn":
            factor = number("factor", context / original)
            rope = replace(
                rope,
                type="yarn",
                factor=factor,
                original_tokens=original,
                beta_fast=number("beta_fast", 32.0) or 32.0,
                beta_slow=number("beta_slow", 1.0) or 1.0,
                truncate=bool(given.get("truncate", True)),
                attention_factor=_yarn_attention_factor(
                    factor,
                    number("attention_factor", math.nan),
                    number("mscale", 0.0),
                    number("mscale_all_dim", 0.0),
                ),
            )
    if rope.factor <= 0 or rope.theta <= 0 or rope.original_tokens < 0:
        raise wrong("must have a positive factor, rope_theta and original_max_position_embeddings")
    return rope


def _kind(given: Mapping[str, object], wrong: Callable[..., CheckpointError]) -> str:
    for key, value in given.items():
        if isinstance(value, dict):
            raise wrong(
                f"must be one set of parameters, but {key!r} holds another",
                "per-layer rope is not supported in this family",
            )
        if key not in _KNOWN:
            raise wrong(f"contains {key}={short(value)}, which is not supported")
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "su":  # the name in the first Phi-3 of 128k
        return "longrope"
    if kind == "deepseek_yarn":
        return "yarn"
    if kind not in _TYPES:
        raise wrong(
            f"has rope_type {kind!r}, which is not one of {', '.join(_TYPES)}",
            "use a checkpoint without it",
        )
    return str(kind)


def extended_context(context: int, rope: Rope) -> int:
    """Type linear multiplies max_position_embeddings, and yarn its original context, by the factor.
    For llama3, max_position_embeddings already includes the extension. dynamic and longrope are
    served without extension."""
    match rope.type:
        case "linear":
            return max(context, int(context * rope.factor))
        case "yarn":
            return max(context, int(rope.original_tokens * rope.factor))
        case "longrope":
            return rope.original_tokens
        case _:
            return context


def _proportional(
    hf: HfConfig, number: Callable[[str, float], float], head_dim: int, defaults: FamilyDefaults
) -> Rope:
    """The number of pairs is rounded as in transformers."""
    part = number("partial_rotary_factor", 1.0)
    theta, factor = number("rope_theta", defaults.rope_theta), number("factor", 1.0)
    pairs = int(part * head_dim // 2)
    if not (0 < pairs <= head_dim // 2 and theta > 0 and factor > 0):
        raise CheckpointError(
            f"{hf.where}: proportional rope must have a positive rope_theta and factor, and a"
            f" partial_rotary_factor in (0, 1] that rotates a pair of {head_dim} values,"
            f" got {part:g}; correct it"
        )
    return Rope(head_dim, theta, "proportional", factor, turned_pairs=pairs)


def _rotated(given: float, hf: HfConfig, head_dim: int, defaults: FamilyDefaults) -> int:
    part = hf.number("partial_rotary_factor", given or defaults.partial_rotary or 1.0)
    if given and part != given:
        raise CheckpointError(
            f"{hf.where}: partial_rotary_factor={part:g} contradicts the rotary parameters, which"
            f" state {given:g}; correct it"
        )
    if defaults.partial_rotary is None and part != 1.0:
        raise CheckpointError(
            f"{hf.where}: partial_rotary_factor is not supported in this family (whole heads are"
            " rotated); remove it or set it to 1"
        )
    rotated = int(head_dim * part)
    if not 0 < rotated <= head_dim or rotated % 2:
        raise CheckpointError(
            f"{hf.where}: partial_rotary_factor={part:g} gives no even part of heads of"
            f" {head_dim}; correct it"
        )
    return rotated


def _divisors(
    given: object, pairs: int, wrong: Callable[[str], CheckpointError]
) -> tuple[float, ...]:
    numbers = given if isinstance(given, list) else []
    good = all(isinstance(x, int | float) and not isinstance(x, bool) and x > 0 for x in numbers)
    if len(numbers) != pairs or not good:
        raise wrong(f"must have {pairs} positive numbers as short_factor, got {short(given)}")
    return tuple(map(float, numbers))


def _longrope_attention_factor(factor: float, original: int, given: float) -> float:
    if not math.isnan(given):
        return given
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _yarn_attention_factor(
    factor: float, given: float, mscale: float, mscale_all_dim: float
) -> float:
    if not math.isnan(given):
        return given

    def temperature(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return (
        temperature(mscale) / temperature(mscale_all_dim)
        if mscale and mscale_all_dim
        else temperature(1.0)
    )
