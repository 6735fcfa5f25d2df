"""Reads the fields that families with experts share: their number, under the names that it has, the
layers that have them, and bounds of their gates."""

from collections.abc import Sequence
from dataclasses import replace

from jdisagg.ops.activations import BoundedGate
from models.decoder_config import DecoderConfig, ExpertConfig
from models.hf_config import HfConfig

TOTAL = "n_routed_experts"
# Names of the same field in published files, and in those that transformers writes.
_NAMES = {"num_experts": TOTAL, "num_local_experts": TOTAL, "moe_num_experts": TOTAL}


def count_experts(hf: HfConfig, default: int | None = None, *, least: int = 1) -> int:
    return hf.renamed(_NAMES).count(TOTAL, default, least=least)


def sparse_layers(hf: HfConfig, config: DecoderConfig, usual: int) -> list[bool]:
    """Uses `mlp_layer_types` if present. Without this field, the first `first_k_dense_replace`
    layers (default `usual`) have none."""
    count = len(config.layers)
    kinds = hf.names("mlp_layer_types")
    if kinds is None:
        dense = hf.count("first_k_dense_replace", usual, least=0)
        kinds = ("dense",) * min(dense, count) + ("sparse",) * (count - dense)
    if len(kinds) != count or any(kind not in ("dense", "sparse") for kind in kinds):
        raise hf.error(
            "mlp_layer_types", f"must list dense or sparse for {count} layers", "correct it"
        )
    hf.pass_over("first_k_dense_replace")  # redundant with mlp_layer_types
    return [kind == "sparse" for kind in kinds]


def with_experts(
    hf: HfConfig, config: DecoderConfig, experts: ExpertConfig, sparse: Sequence[bool] | None = None
) -> DecoderConfig:
    """Gives `experts` to the layers that `sparse` selects, or to all. Raises CheckpointError if a
    token has more experts than there are."""
    if experts.experts_per_token > experts.experts:
        raise hf.error("num_experts_per_tok", f"must be at most {experts.experts}", "correct it")
    every = (True,) * len(config.layers) if sparse is None else sparse
    layers = zip(config.layers, every, strict=True)
    return replace(
        config,
        layers=tuple(replace(layer, experts=experts if has else None) for layer, has in layers),
    )


def gate_bounds(hf: HfConfig, field: str, count: int) -> tuple[BoundedGate | None, ...]:
    """Reads the bounds of gates, a number for each layer. null and 0 mean no bound."""
    given = hf.raw(field)
    if not given:
        return (None,) * count
    if (
        not isinstance(given, list)
        or len(given) < count
        or not all(one is None or isinstance(one, int | float) for one in given)
    ):
        raise hf.error(
            field, f"must have a number or null for each of {count} layers", "correct it"
        )
    return tuple(BoundedGate(float(one)) if one else None for one in given[:count])
