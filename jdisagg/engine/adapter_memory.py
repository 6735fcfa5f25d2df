"""Computes the memory that the slots of LoRA adapters take on each device of an instance.

A slot has room for both LoRA factors of every matrix of attention and feed-forward blocks."""

from jdisagg.config import InstanceConfig
from jdisagg.costs.model_geometry import CostGeometry, LatentAttention, dtype_bytes


def adapter_bytes(geometry: CostGeometry, instance: InstanceConfig, dtype: str) -> int:
    if not instance.adapters:
        return 0
    values = _attention_values(geometry, instance) + _feed_forward_values(geometry, instance)
    return int(values * instance.adapters * instance.adapter_rank * dtype_bytes(dtype))


def _attention_values(geometry: CostGeometry, instance: InstanceConfig) -> float:
    width, tp, total = geometry.width, instance.layout.tp, 0.0
    for kind, layers in geometry.attention_kinds:
        if isinstance(kind, LatentAttention):
            heads = kind.query_heads / tp
            queries = heads * (kind.nope_dim + kind.rope_dim)
            into = width + queries
            if kind.query_rank:
                into = width + 2 * kind.query_rank + queries
            total += layers * (into + width + kind.kv_values + heads * kind.value_dim + width)
            continue
        queries = kind.query_heads * kind.head_dim / tp
        keys = kind.kv_heads * kind.head_dim / min(tp, kind.kv_heads)
        made = kind.made_heads // kind.kv_heads
        total += layers * ((2 + kind.gated) * (width + queries) + made * (width + keys))
    return total


def _feed_forward_values(geometry: CostGeometry, instance: InstanceConfig) -> float:
    layout, width, experts = instance.layout, geometry.width, geometry.experts
    matrices = geometry.matrices
    total = geometry.dense_layers * matrices * (width + geometry.ffn / layout.tp)
    total += geometry.doubled_ffn * matrices * geometry.ffn / layout.tp
    if experts is None:
        return total
    each = 0.0
    if experts.shared_ffn:
        each += matrices * (width + experts.shared_ffn / layout.tp)
    wide = experts.routed_width(width)
    if experts.latent:
        each += 2 * (width + wide)
    if instance.adapter_experts:
        ffn = experts.ffn if layout.ep > 1 else experts.ffn / layout.tp
        each += experts.count / layout.ep * matrices * (wide + ffn)
    return total + geometry.expert_layers * each
