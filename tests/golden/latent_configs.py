"""Random configurations of families with latent attention, for `tests/golden/random_configs.py`."""

from tests.golden.draw import FULL, LINEAR, Draw, Fields


def _latent(draw: Draw) -> Fields:
    fields = draw.base()
    fields.pop("head_dim", None)
    return (
        fields
        | draw.groups()
        | {
            "num_key_value_heads": draw.heads,
            "kv_lora_rank": draw.one_of(10, 20, 34),
            "q_lora_rank": draw.one_of(None, 14, 22),
            "qk_rope_head_dim": draw.one_of(4, 6, 10),
            "qk_nope_head_dim": draw.one_of(6, 10, 16),
            "v_head_dim": draw.one_of(6, 12, 18),
            "attention_bias": draw.flag(0.3),
            "first_k_dense_replace": draw.random.randint(0, draw.layers - 1),
            "rope_parameters": draw.rope("default", "yarn", "linear"),
        }
    )


def deepseek_v2(draw: Draw) -> Fields:
    fields = _latent(draw) | {"norm_topk_prob": False, "attention_bias": False}
    return fields | {"topk_method": draw.one_of("greedy", "group_limited_greedy")}


def deepseek_v3(draw: Draw) -> Fields:
    return _latent(draw) | {"rope_interleave": draw.flag(0.7)}


def glm4_moe_lite(draw: Draw) -> Fields:
    fields = deepseek_v3(draw)
    dense = fields.pop("first_k_dense_replace")
    sparse = ["dense" if at < dense else "sparse" for at in range(draw.layers)]  # type: ignore[operator]
    return fields | {"mlp_layer_types": sparse}


def indexed(draw: Draw) -> Fields:
    fields = _latent(draw)
    turned = int(fields["qk_rope_head_dim"])  # type: ignore[call-overload]
    fields["q_lora_rank"] = draw.one_of(14, 22)
    fields["rope_parameters"] = draw.rope("default", "yarn")
    return fields | {
        "index_topk": draw.one_of(16, 40, 2048),
        "index_n_heads": draw.one_of(24, 32),
        "index_head_dim": turned + draw.random.choice((0, 2, 6)),
    }


def glm_moe_dsa(draw: Draw) -> Fields:
    """Some layers share the selection of an earlier one."""
    rest = (draw.random.choice(("full", "shared", "shared")) for _ in range(draw.layers - 2))
    selects = {"indexer_types": ["full", "shared", *rest], "index_topk": draw.one_of(16, 40)}
    return indexed(draw) | selects


def kimi_k25(draw: Draw) -> Fields:
    return deepseek_v3(draw) | {"model_type": "deepseek_v3"}


def kimi_linear(draw: Draw) -> Fields:
    fields = _latent(draw)
    del fields["rope_parameters"]
    return fields | {
        "num_experts": fields.pop("n_routed_experts"),
        "linear_num_heads": draw.random.choice((4, 8) if draw.even else (1, 2, 3)),
        "linear_head_dim": draw.one_of(6, 8, 12),
        "linear_conv_kernel_dim": draw.one_of(2, 3, 4),
        "layer_types": draw.kinds(LINEAR, FULL),
    }


def bailing_hybrid(draw: Draw) -> Fields:
    fields = _latent(draw)
    fields["num_local_experts"] = fields.pop("n_routed_experts")
    fields["rope_parameters"] = draw.rope("default", "yarn")
    layers = {"layer_types": draw.kinds(LINEAR, FULL)}
    if draw.flag():
        layers = {"layer_group_size": draw.random.randint(1, draw.layers)}
    return (
        fields
        | layers
        | {
            "attention_bias": False,
            "head_dim": draw.one_of(6, 8, 12),
            "short_conv_kernel_size": draw.one_of(2, 3, 4),
            "kda_lower_bound": draw.one_of(-5.0, -2.0),
            "kda_safe_gate": draw.flag(0.8),
        }
    )


def mistral4(draw: Draw) -> Fields:
    fields = deepseek_v3(draw) | {"n_group": 1, "topk_group": 1}
    turned, still = fields["qk_rope_head_dim"], fields["qk_nope_head_dim"]
    part = turned / (turned + still)  # type: ignore[operator]
    growth = {"llama_4_scaling_beta": draw.one_of(0.1, 0.3), "partial_rotary_factor": part}
    return fields | {"rope_parameters": draw.rope("yarn") | growth}


def youtu(draw: Draw) -> Fields:
    fields = draw.base()
    fields.pop("head_dim", None)
    names = ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    latent = _latent(draw)
    fields |= {name: latent[name] for name in (*names, "attention_bias", "rope_parameters")}
    return fields | {"num_key_value_heads": draw.heads, "rope_interleave": draw.flag(0.7)}
