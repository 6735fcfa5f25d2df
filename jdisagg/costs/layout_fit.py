"""Checks whether a layout divides a model's heads, experts and layers evenly, given only the sizes
of the model."""

from jdisagg.costs.dense_products import most_state_shards
from jdisagg.costs.model_geometry import CostGeometry, LatentAttention
from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout, ModelGeometry


def check_layout(
    geometry: CostGeometry, layout: Layout, *, redundant_experts: bool = False
) -> None:
    """Checks that the layout divides the model's heads, experts and layers evenly. Raises
    LayoutError or ConfigError if not. `redundant_experts`: whether experts are replicated until ep
    divides their number."""
    attention, experts = geometry.attention, geometry.experts
    linear = geometry.linear
    # Every device holds a whole latent, so any tp that divides the query heads is allowed.
    latent = isinstance(attention, LatentAttention) and not linear
    kv_heads = layout.tp if latent else most_state_shards(geometry)
    sizes = ModelGeometry(
        attention.query_heads,
        kv_heads,
        geometry.ffn,
        expert_slots(geometry, layout, redundant_experts=redundant_experts),
        experts.ffn if experts else 0,
        state_key_heads=linear.sharded_key_heads if linear else 0,
        state_value_heads=linear.value_heads if linear else 0,
    )
    layout.check(sizes)
    if layout.pp > geometry.layers:
        raise ConfigError(
            f"{layout.pp} pipeline stages do not fit a model of {geometry.layers} layers; choose 1"
            f" to {geometry.layers}"
        )


def expert_slots(geometry: CostGeometry, layout: Layout, *, redundant_experts: bool) -> int:
    count = geometry.experts.count if geometry.experts else 0
    return -(-count // layout.ep) * layout.ep if redundant_experts else count
