"""Random configurations of families with experts that differ from others by fields and defaults
alone."""

from tests.golden.draw import FULL, WINDOWED, Draw, Fields


def _windows(draw: Draw, *, half: bool = False) -> Fields:
    """Windows, and rotary parameters by kind of layer; `half`: of a part of each head."""
    ropes = {FULL: draw.rope("default", "yarn", "linear"), WINDOWED: draw.rope("default")}
    if half:
        ropes[FULL] |= {"partial_rotary_factor": 1.0 if draw.head_dim % 4 else 0.5}
    layers: Fields = {"layer_types": draw.kinds(FULL, WINDOWED)} if draw.flag(0.8) else {}
    return layers | {"sliding_window": draw.window(), "rope_parameters": ropes}


def ernie4_5_moe(draw: Draw) -> Fields:
    fields = draw.base() | draw.experts("moe_num_experts") | {"head_dim": draw.head_dim}
    fields["moe_k"] = fields.pop("num_experts_per_tok")
    return fields | {
        "rope_parameters": draw.rope("default", "yarn"),
        "moe_num_shared_experts": draw.one_of(0, 1, 2),
        "moe_layer_start_index": draw.random.randint(0, draw.layers - 1),
        "moe_layer_end_index": draw.one_of(-1, draw.layers - 1),
        "moe_layer_interval": draw.one_of(1, 1, 2),
    }


def hunyuan_v1_moe(draw: Draw) -> Fields:
    rope = draw.rope("default") | draw.random.choice(
        ({}, {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0})
    )
    fields = draw.base() | draw.experts() | {"head_dim": draw.head_dim, "rope_parameters": rope}
    fields |= {"intermediate_size": fields.pop("moe_intermediate_size")}
    fields["moe_topk"] = fields.pop("num_experts_per_tok")
    return fields | {"attention_bias": draw.flag()}


def glm4v_moe(draw: Draw) -> Fields:
    fields = draw.base() | draw.groups() | {"head_dim": draw.head_dim}
    pairs = draw.head_dim // 2 // 2  # of half a head
    first = draw.random.randint(0, pairs)
    rope = draw.rope("default") | {"mrope_section": [first, pairs - first, 0]}
    dense = {"first_k_dense_replace": draw.random.randint(0, draw.layers - 1)}
    fields |= {"rope_parameters": rope | {"partial_rotary_factor": 2 * pairs / draw.head_dim}}
    return fields | {"attention_bias": draw.flag(0.7)} | dense


def solar_open(draw: Draw) -> Fields:
    fields = draw.base() | draw.groups() | {"head_dim": draw.head_dim}
    fields.pop("intermediate_size")
    return fields | {"rope_parameters": draw.rope("default", "yarn")}


def sarvam_moe(draw: Draw) -> Fields:
    fields = draw.base() | draw.groups() | {"head_dim": draw.head_dim, "use_qk_norm": draw.flag()}
    dense = {"first_k_dense_replace": draw.random.randint(0, draw.layers - 1)}
    rope = draw.rope("default", "yarn") | {"partial_rotary_factor": 1.0}
    return fields | {"rope_parameters": rope, "attention_bias": draw.flag()} | dense


def exaone_moe(draw: Draw) -> Fields:
    fields = draw.base(own_head_dim=False) | draw.groups()
    fields["num_experts"] = fields.pop("n_routed_experts")
    fields["num_shared_experts"] = fields.pop("n_shared_experts")
    dense = {"first_k_dense_replace": draw.random.randint(0, draw.layers - 1)}
    fed = {"mlp_layer_types": draw.kinds("dense", "sparse")} if draw.flag() else dense
    windows = {"sliding_window": draw.window(), "sliding_window_pattern": draw.one_of(2, 4)}
    return fields | fed | windows | {"rope_parameters": draw.rope("default", "llama3")}


def cohere2_moe(draw: Draw) -> Fields:
    fields = draw.base() | draw.experts() | {"head_dim": draw.head_dim}
    fields["intermediate_size"] = fields.pop("moe_intermediate_size")
    fields["layer_norm_eps"] = fields["rms_norm_eps"]
    if draw.flag():
        fields["rms_norm_eps"] = None
    fed = {"mlp_layer_types": draw.kinds("dense", "sparse")} if draw.flag() else {}
    layers = {"layer_types": draw.kinds(FULL, WINDOWED)} if draw.flag() else {}
    first = {"first_k_dense_replace": draw.random.randint(0, draw.layers - 1)}
    return (
        fields
        | (fed or first)
        | layers
        | {
            "sliding_window": draw.window(),
            "rope_parameters": draw.rope("default", "yarn"),
            "logit_scale": draw.one_of(0.25, 1.0, 3.0),
            "num_shared_experts": draw.one_of(0, 1, 2),
            "shared_expert_combination_strategy": draw.one_of("average", "sum"),
            "expert_selection_fn": draw.one_of("softmax", "sigmoid"),
            "norm_topk_prob": draw.flag(),
            "prefix_dense_sliding_window_pattern": draw.one_of(1, 2),
            "prefix_dense_intermediate_size": draw.ffn(),
        }
    )


def lfm2_moe(draw: Draw) -> Fields:
    fields = draw.base(own_head_dim=False) | draw.experts()
    fields.pop("head_dim", None)
    fields["norm_eps"] = fields.pop("rms_norm_eps")
    return fields | {
        "rope_parameters": draw.rope("default", "yarn"),
        "layer_types": draw.kinds("conv", FULL),
        "conv_L_cache": draw.one_of(2, 3, 4),
        "conv_bias": draw.flag(),
        "num_dense_layers": draw.random.randint(0, draw.layers - 1),
        "use_expert_bias": draw.flag(0.7),
        "norm_topk_prob": draw.flag(0.7),
        "routed_scaling_factor": draw.one_of(1.0, 1.7),
    }


def afmoe(draw: Draw) -> Fields:
    fields = draw.base() | draw.experts() | {"head_dim": draw.head_dim}
    layers = {"layer_types": draw.kinds(FULL, WINDOWED)} if draw.flag() else {}
    return (
        fields
        | layers
        | {
            "sliding_window": draw.window(),
            "rope_parameters": draw.rope("default", "yarn"),
            "global_attn_every_n_layers": draw.one_of(2, 4),
            "num_dense_layers": draw.random.randint(0, draw.layers - 1),
            "num_shared_experts": draw.one_of(1, 2),
            "route_scale": draw.one_of(1.0, 2.4),
            "mup_enabled": draw.flag(),
            "attention_bias": draw.flag(0.3),
        }
    )


def mellum(draw: Draw) -> Fields:
    fields = draw.base() | draw.experts() | {"head_dim": draw.head_dim} | _windows(draw)
    fed = {"mlp_layer_types": draw.kinds("dense", "sparse")} if draw.flag() else {}
    return fields | fed | {"attention_bias": draw.flag(), "norm_topk_prob": draw.flag()}


def laguna(draw: Draw) -> Fields:
    fields = draw.base() | draw.experts() | {"head_dim": draw.head_dim} | _windows(draw, half=True)
    kinds = fields.get("layer_types") or [FULL] * draw.layers
    more = draw.kv_heads * draw.random.choice((1, 2, 3))
    heads = [more if kind == WINDOWED else draw.heads for kind in kinds]  # type: ignore[attr-defined]
    fed = {"mlp_layer_types": draw.kinds("dense", "sparse")} if draw.flag() else {}
    by_layer = {"num_attention_heads_per_layer": heads} if draw.flag(0.7) else {}
    return (
        fields
        | fed
        | by_layer
        | {
            "gating": draw.one_of(True, "per-head", "per-element"),
            "attention_bias": draw.flag(0.3),
            "shared_expert_intermediate_size": draw.ffn(),
            "moe_routed_scaling_factor": draw.one_of(1.0, 2.5),
        }
    )
