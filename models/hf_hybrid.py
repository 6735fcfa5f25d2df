"""Reads config.json fields of hybrid models, which have Mamba-2 and attention layers: the kind of
each layer, and the limits of Mamba-2's step size. Accepts the current and the former names that
transformers uses for the kinds of layers."""

import math
from collections.abc import Mapping
from dataclasses import replace

from models.decoder_config import LayerConfig, MambaConfig
from models.hf_config import HfConfig

NAMES = {
    "mamba": ("mamba", "linear_attention"),
    "attention": ("attention", "full_attention"),
    "mlp": ("mlp",),
    "moe": ("moe",),
}


def read_kinds(hf: HfConfig, field: str, kinds: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Raises CheckpointError for a kind outside `kinds`."""
    stated = hf.names(field)
    if stated is None or kinds is None:
        return stated
    called = {name: kind for kind in kinds for name in NAMES[kind]}
    for name in stated:
        if name not in called:
            raise hf.error(
                field, f"must list layers of {', '.join(called)}", "others are not supported"
            )
    return tuple(called[name] for name in stated)


def hybrid_layers(
    hf: HfConfig, field: str, kinds: tuple[str, ...], layers: Mapping[str, LayerConfig]
) -> tuple[LayerConfig, ...]:
    """Raises CheckpointError if no layer has attention."""
    if "attention" not in kinds:
        raise hf.error(
            field, "must list a layer with attention", "models without one are not supported"
        )
    return tuple(layers[kind] for kind in kinds)


def checked_mamba(hf: HfConfig, mamba: MambaConfig, kv_heads: int, groups: str) -> MambaConfig:
    """Returns `mamba` with the step limits of config.json, and with `copies` set to `kv_heads` if
    the number of groups is not a multiple of `kv_heads`. `groups` is the name of the config field
    with the number of groups, for error messages."""
    if mamba.heads % mamba.groups:
        raise hf.error(groups, f"must divide the {mamba.heads} Mamba heads", "correct it")
    return replace(
        mamba, copies=0 if mamba.groups % kv_heads == 0 else kv_heads, step_limits=_step_limits(hf)
    )


def _step_limits(hf: HfConfig) -> tuple[float, float]:
    stated = hf.raw("time_step_limit")
    if stated is None:
        return 0.0, math.inf
    limits = [_limit(each) for each in stated] if isinstance(stated, list) else []
    if len(limits) != 2 or not 0 <= limits[0] <= limits[1]:
        raise hf.error("time_step_limit", "must be two non-negative numbers in order", "correct it")
    return limits[0], limits[1]


def _limit(stated: object) -> float:
    if isinstance(stated, dict):
        stated = stated.get("__float__")
    if isinstance(stated, str) and stated in ("Infinity", "inf"):
        return math.inf
    return float(stated) if isinstance(stated, int | float) else math.nan
