"""Random configurations of Llama and of families that are Llama with options of their own."""

from tests.golden.draw import FULL, LINEAR, WINDOWED, Draw, Fields


def llama(draw: Draw) -> Fields:
    biases = {"attention_bias": draw.flag(), "mlp_bias": draw.flag()}
    return draw.base() | biases | {"rope_parameters": draw.rope()}


def internlm3(draw: Draw) -> Fields:
    bias = draw.flag()
    return llama(draw) | {"attention_bias": bias, "mlp_bias": bias}


def cwm(draw: Draw) -> Fields:
    layers = {"layer_types": draw.kinds(FULL, WINDOWED)} if draw.flag() else {}
    fields = draw.base() | {"head_dim": draw.head_dim, "sliding_window": draw.window()}
    return fields | layers | {"rope_parameters": draw.rope("llama3", "default")}


def arcee(draw: Draw) -> Fields:
    return llama(draw) | {"rope_parameters": draw.rope("default", "yarn", "linear")}


def granite(draw: Draw) -> Fields:
    return llama(draw) | {
        "attention_multiplier": draw.one_of(0.1, 0.3),
        "embedding_multiplier": draw.one_of(1.0, 3.0),
        "residual_multiplier": draw.one_of(0.7, 1.3),
        "logits_scaling": draw.one_of(0.5, 2.0),
    }


def granitemoe(draw: Draw) -> Fields:
    fields = granite(draw) | draw.experts("num_local_experts")
    fields.pop("mlp_bias")
    fields["intermediate_size"] = fields.pop("moe_intermediate_size")
    return fields | {"rope_parameters": draw.rope("default", "yarn")}


def granitemoeshared(draw: Draw) -> Fields:
    return granitemoe(draw) | {"shared_intermediate_size": draw.one_of(0, draw.ffn())}


def _swa(draw: Draw) -> Fields:
    layers: Fields = {"layer_types": draw.kinds(FULL, WINDOWED)} if draw.flag() else {}
    thetas = [draw.one_of(0, 10000.0, 777.7) for _ in range(draw.layers)]
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    bases = {"layer_rope_theta": thetas} if draw.flag(0.7) else {}
    return layers | bases | {"sliding_window": draw.window(), "rope_parameters": rope}


def granite_swa(draw: Draw) -> Fields:
    return granite(draw) | _swa(draw)


def granitemoe_swa(draw: Draw) -> Fields:
    return granitemoeshared(draw) | _swa(draw)


def granitemoehybrid(draw: Draw) -> Fields:
    fields = granite(draw) | draw.experts("num_local_experts")
    fields.pop("mlp_bias")
    ffn = fields.pop("moe_intermediate_size")
    heads = draw.random.choice((4, 8) if draw.even else (2, 3, 6))
    size = draw.random.choice((6, 8, 16))
    # twice the width is what heads of Mamba add up to
    expand = 2
    fields["hidden_size"] = heads * size // expand
    if heads * size % expand or "head_dim" not in fields:
        fields["hidden_size"] = draw.heads * draw.head_dim
        heads, size = draw.heads, draw.head_dim * expand
    fields["intermediate_size"] = ffn
    if draw.flag(0.4):
        fields |= {"num_local_experts": 0, "num_experts_per_tok": 0}
    return fields | {
        "layer_types": draw.kinds(LINEAR, FULL),
        "shared_intermediate_size": draw.ffn(),
        "position_embedding_type": draw.one_of("rope", None, "nope"),
        "mamba_n_heads": heads,
        "mamba_d_head": size,
        "mamba_d_state": draw.one_of(8, 12, 20),
        "mamba_expand": expand,
        "mamba_n_groups": draw.random.choice([g for g in (1, 2, 3, 4) if heads % g == 0]),
        "mamba_d_conv": draw.one_of(2, 3, 4),
        "mamba_chunk_size": draw.one_of(8, 32, 256),
        "mamba_conv_bias": draw.flag(),
        "mamba_proj_bias": draw.flag(),
    }


def cohere(draw: Draw) -> Fields:
    fields = draw.base(own_head_dim=False) | {"rope_parameters": draw.rope("default", "yarn")}
    fields.pop("head_dim", None)
    fields["layer_norm_eps"] = fields.pop("rms_norm_eps")
    options = {"attention_bias": draw.flag(), "use_qk_norm": draw.flag()}
    return fields | {"logit_scale": draw.one_of(0.25, 1.0, 3.0)} | options


def cohere2(draw: Draw) -> Fields:
    windows = {"sliding_window": draw.window(), "layer_types": draw.kinds(FULL, WINDOWED)}
    return cohere(draw) | windows | {"use_qk_norm": False}


def exaone4(draw: Draw) -> Fields:
    fields = draw.base(own_head_dim=False) | {"rope_parameters": draw.rope("default", "llama3")}
    windows = {"sliding_window": draw.window(), "sliding_window_pattern": draw.one_of(2, 4)}
    return fields | (windows if draw.flag(0.7) else {"sliding_window": None})


def exaone4_5(draw: Draw) -> Fields:
    return exaone4(draw) | {"model_type": "exaone4"}


def gemma4_text(draw: Draw) -> Fields:
    own = draw.random.choice([heads for heads in (1, 2, 3, 4) if draw.heads % heads == 0])
    size = draw.random.choice((16, 24, 40))
    part = draw.random.choice((0.25, 0.5, 1.0))
    ropes = {
        FULL: {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": part},
        WINDOWED: draw.rope("default"),
    }
    fields = draw.base() | {
        "head_dim": draw.head_dim,
        "global_head_dim": size,
        "num_global_key_value_heads": own,
        "attention_k_eq_v": draw.flag(),
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "sliding_window": draw.window(),
        "layer_types": draw.kinds(FULL, WINDOWED, last=FULL),
        "final_logit_softcapping": draw.one_of(None, 12.0),
        "rope_parameters": ropes,
        "use_bidirectional_attention": None,
    }
    if draw.flag():
        experts = draw.experts()
        experts["top_k_experts"] = experts.pop("num_experts_per_tok")
        fields |= experts | {"enable_moe_block": True}
    fields |= _token_inputs(draw, fields)
    return fields | _shared_layers(draw, fields)


def _token_inputs(draw: Draw, fields: Fields) -> Fields:
    size = {"hidden_size_per_layer_input": draw.one_of(5, 8)} if draw.flag() else {}
    return size | {"vocab_size_per_layer_input": fields["vocab_size"]}


def _shared_layers(draw: Draw, fields: Fields) -> Fields:
    """Both kinds of layers must have some with keys and values of their own. transformers 5.24
    fails on shared layers if layers read no tokens."""
    kinds: list[str] = fields["layer_types"]  # type: ignore[assignment]
    least = max(kinds.index(kind) for kind in {*kinds}) + 1
    shared = draw.random.randint(0, draw.layers - least)
    shared *= fields["hidden_size_per_layer_input"] != 0
    wide = draw.flag() and not fields.get("enable_moe_block")
    return {"num_kv_shared_layers": shared, "use_double_wide_mlp": wide}


def gemma4_unified_text(draw: Draw) -> Fields:
    fields = gemma4_text(draw)
    for name in fields.keys() & {"num_experts", "top_k_experts", "moe_intermediate_size"}:
        fields.pop(name)
    own = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
    return fields | own | {"enable_moe_block": False, "use_double_wide_mlp": False}
