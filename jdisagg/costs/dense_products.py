"""Lists the dense matrix products of a model's layers on one device, for the cost model."""

import math
from dataclasses import dataclass

from jdisagg.costs.linear_attention import LinearAttention
from jdisagg.costs.model_geometry import CostGeometry, GroupedAttention, LatentAttention
from jdisagg.layout.axes import Layout

# A matrix: number of parameters, number of layers with such a matrix, number of devices over which
# it is sharded, columns of the result on one device, number of parameters that are never quantized.
Part = tuple[float, int, int, float, float]


@dataclass(frozen=True, slots=True)
class Product:
    """The product of a layer's input with one weight matrix, or with several fused matrices.

    Attributes:
        flops, activation_bytes: FLOP, and bytes of inputs and results, for one token.
    """

    flops: float
    weight_bytes: float
    activation_bytes: float
    layers: int
    columns: float


def most_kv_shards(shape: CostGeometry) -> int:
    attention = shape.attention
    return 1 if isinstance(attention, LatentAttention) else attention.shared_kv_heads


def most_state_shards(shape: CostGeometry) -> int:
    """The number is the same as for kv heads. A model with a latent has no kv heads. Its state is
    sharded by its own heads, and a transfer cuts the latent into the same number of parts."""
    attention, linear = shape.attention, shape.linear
    if not isinstance(attention, LatentAttention) or not linear:
        return most_kv_shards(shape)
    return math.gcd(linear.key_heads, attention.kv_rank + attention.rope_dim)


def dense_products(
    shape: CostGeometry, layout: Layout, shards: int, value_bytes: float, matrix_bytes: float
) -> tuple[Product, ...]:
    """Returns the matrix products on one device that every token passes: attention projections,
    dense ffn, shared expert and MoE router. Routed experts are not included."""
    tp = layout.tp
    attention = shape.attention
    dense = shape.dense_layers + shape.doubled_ffn
    if isinstance(attention, LatentAttention):
        parts: list[Part] = []
        for kind, layers in shape.attention_kinds:
            assert isinstance(kind, LatentAttention)
            down = shape.width * (kind.query_rank + kind.kv_values)
            index = kind.index_heads * (kind.query_rank * kind.index_dim + shape.width)
            up = kind.parameters(shape.width) - down - index
            parts.append((down, layers, 1, down / shape.width, 0))
            parts.append((up, layers, tp, shape.width, kind.unpacking_parameters))
            if index:  # replicated
                wide = kind.index_heads * (kind.index_dim + 1)
                parts.append((index, layers, 1, wide, 0))
    else:
        parts = _projections(shape, tp, shards)
    if shape.linear:
        parts += _recurrent(shape.linear, shape.width, tp, shards)
    if dense:
        wide = shape.ffn * (shape.matrices - 1)
        parts += [
            (shape.width * wide, dense, tp, wide / tp, 0),
            (shape.width * shape.ffn, dense, tp, shape.width, 0),
        ]
    if inner := shape.token_inputs:
        parts.append((3 * shape.width * inner, shape.layers, 1, 2 * inner + shape.width, 0))
    if shape.experts:
        count = shape.experts.count + shape.experts.shared_gate
        layers = shape.expert_layers
        parts.append((shape.width * count, layers, 1, count, shape.width * count))
        if latent := shape.experts.latent:
            parts.append((2 * shape.width * latent, layers, 1, shape.width + latent, 0))
        if shape.experts.shared_ffn:
            wide = shape.experts.shared_ffn * shape.matrices
            parts.append((shape.width * wide, layers, tp, wide / tp, 0))
    products = []
    for parameters, layers, over, columns, plain in parts:
        own = parameters / over
        moved = (shape.width + own / shape.width) * value_bytes
        held = (parameters - plain) * matrix_bytes + plain * value_bytes
        products.append(Product(2 * own, held / over, moved, layers, columns))
    return tuple(products)


def _recurrent(linear: LinearAttention, width: int, tp: int, shards: int) -> list[Part]:
    keys = linear.key_channels / (1 if linear.key_copies else shards)
    channels, scalars = linear.values / shards + keys, linear.scalars / shards
    taps = channels * linear.taps if linear.convolution else 0
    wide = (1 + linear.short) * channels + scalars + linear.values / tp
    plain = width * scalars + taps
    into = width * wide
    if rank := linear.gate_rank:  # two products in place of one, for gates and output gate
        gates, inner = linear.value_heads * linear.key_dim / shards, linear.values / tp
        wide = channels + linear.value_heads / shards + 2 * rank + gates + inner
        plain = width * linear.value_heads / shards + rank * (width + gates) + taps
        into = width * (wide - gates - inner) + rank * (gates + inner)
    return [
        (into + taps, linear.layers, 1, wide, plain),
        (width * linear.values, linear.layers, tp, width, 0),
    ]


def _projections(shape: CostGeometry, tp: int, shards: int) -> list[Part]:
    parts: list[Part] = []
    for (kind, layers), (_, own) in zip(shape.attention_kinds, shape.kv_kinds, strict=True):
        assert not isinstance(kind, LatentAttention)
        queries = tp if kind.kv_heads == most_kv_shards(shape) else shards
        late = kind.head_dim * (kind.query_heads / queries + kind.gated * kind.query_heads / tp)
        late += kind.head_gates * kind.query_heads / tp
        wide = late + kind.kv_parameters(1) / shards
        out = shape.width * kind.value_size * kind.query_heads
        parts.append((shape.width * wide, own, 1, wide, 0))
        if layers > own:
            parts.append((shape.width * late, layers - own, 1, late, 0))
        parts.append((out, layers, tp, shape.width, 0))
    attention = shape.attention
    if isinstance(attention, GroupedAttention) and attention.indexed_layers:
        # One query for each kv head, and one key. Never quantized.
        wide = attention.index_dim * (attention.kv_heads / shards + 1)
        into = shape.width * wide
        parts.append((into, attention.indexed_layers, 1, wide, into))
    return parts
