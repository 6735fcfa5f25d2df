"""Random configurations of families whose layers have other numbers of heads."""

from tests.golden.draw import FULL, WINDOWED, Draw, Fields


def mimo_v2_flash(draw: Draw) -> Fields:
    fields = draw.base() | draw.groups() | {"head_dim": draw.head_dim}
    fields |= {"num_attention_heads": 2 * draw.heads, "attention_bias": draw.flag()}
    part = draw.random.choice([p for p in (0.5, 1.0) if int(draw.head_dim * p) % 2 == 0])
    ropes = {kind: draw.rope("default") for kind in (FULL, WINDOWED)}
    return fields | {
        "v_head_dim": draw.one_of(6, 8, 14),
        "attention_value_scale": draw.one_of(0.707, None, 1.3),
        "sliding_window": draw.window(),
        "layer_types": draw.kinds(FULL, WINDOWED),
        "mlp_layer_types": draw.kinds("dense", "sparse"),
        "rope_parameters": {
            kind: rope | {"partial_rotary_factor": part} for kind, rope in ropes.items()
        },
    }


def step3p7(draw: Draw) -> Fields:
    fields = draw.base() | draw.experts("n_routed_experts") | {"head_dim": draw.head_dim}
    count = len(kinds := draw.kinds(FULL, WINDOWED))
    full, windowed = draw.one_of(10000.0, 5e6), draw.one_of(10000.0, 777.7)
    part = draw.random.choice([p for p in (0.5, 1.0) if int(draw.head_dim * p) % 2 == 0])
    bounds = [[draw.one_of(None, 0.3, 7.0) for _ in range(count)] for _ in range(2)]
    scaling = {"rope_scaling": draw.rope("llama3") | {"rope_theta": full}} if draw.flag() else {}
    return (
        fields
        | scaling
        | {
            "layer_types": kinds,
            "mlp_layer_types": draw.kinds("dense", "sparse"),
            "num_sliding_attention_heads": draw.kv_heads * draw.random.choice((1, 2, 3)),
            "sliding_window": draw.window(),
            "share_expert_dim": draw.ffn(),
            "moe_router_scaling_factor": draw.one_of(1.0, 3.0),
            "swiglu_limits": draw.one_of(None, bounds[0]),
            "swiglu_limits_shared": draw.one_of(None, bounds[1]),
            "rope_theta": [full if kind == FULL else windowed for kind in kinds],
            "partial_rotary_factors": [part if kind == FULL else 1.0 for kind in kinds],
        }
    )
