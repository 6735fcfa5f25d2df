"""Gemma 4's text model: some layers have a window. Layers without a window differ in head size and
number of kv heads. Their values may be computed with the keys' matrix, and only a part of each head
has rotary positions. Blocks have norms before and after, and each layer's output has a factor.
26B-A4B has experts in parallel with each dense block.

In E2B and E4B layers read the tokens (`models/token_inputs.py`), and the last layers have no keys
and values: they attend to those of the last layer of the same kind that has its own."""

from collections.abc import Mapping
from dataclasses import replace

from jdisagg.ops.activations import GeluGate
from models.decoder_config import AttentionConfig, DecoderConfig, ExpertConfig, LayerConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, read_layer_types
from models.hf_rope import ropes_by_kind

DEFAULTS = FamilyDefaults(kv_heads=4, context_tokens=131072, tied=True)
_ROPES: dict[str, dict[str, object]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    },
}


def read_unified_config(hf: HfConfig) -> DecoderConfig:
    """Reads the config.json of Gemma 4 12B, in which an absent field means no per-layer
    embeddings."""
    none = {} if "hidden_size_per_layer_input" in hf.fields else {"hidden_size_per_layer_input": 0}
    return read_config(hf.changed(**none), replace(DEFAULTS, context_tokens=262144), 1024)


def read_config(
    hf: HfConfig, defaults: FamilyDefaults = DEFAULTS, window: int = 512
) -> DecoderConfig:
    """Reads config.json, either as published or as transformers 5 writes it. `window` is the
    default of its field. Raises CheckpointError."""
    if hf.raw("use_bidirectional_attention") not in (None, "vision") and not hf.sizes_only:
        # "vision" applies within images, which are not served.
        raise hf.error(
            "use_bidirectional_attention",
            "must be null or 'vision'",
            "attention to later tokens is not supported",
        )
    bias = hf.flag("attention_bias", False)
    config = read_decoder(
        hf.changed(rope_parameters=None),
        defaults,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        head_dim_default=256,
        activation="gelu_tanh",
    )
    count = len(config.layers)
    windows = read_layer_types(
        hf, count, hf.count("sliding_window", window), [at % 6 != 0 for at in range(1, count + 1)]
    )
    if windows[-1] is not None:
        raise hf.error("layer_types", "must end with full_attention", "correct it")
    windowed = replace(config.attention, scale=1.0, value_norm=True)
    full = _full(hf, windowed, windows)
    sizes = {"sliding_attention": windowed.head_dim, "full_attention": full.head_dim}
    ropes = ropes_by_kind(hf, _ROPES, sizes, config.context_tokens, DEFAULTS)
    windowed = replace(windowed, rope=ropes["sliding_attention"])
    full = replace(full, rope=ropes["full_attention"])
    plain = windowed if any(windows) else full
    sources, experts = _sources(hf, windows), _experts(hf, config.ffn)
    wider = hf.flag("use_double_wide_mlp", False)
    if wider and experts and any(source is not None for source in sources):
        raise hf.error("use_double_wide_mlp", "must be false with experts", "correct it")
    return replace(
        config,
        attention=plain,
        layers=tuple(
            LayerConfig(
                window,
                experts,
                attention=None if window or plain is full else full,
                source=source,
                ffn=2 * config.ffn if wider and source is not None else 0,
            )
            for window, source in zip(windows, sources, strict=True)
        ),
        token_inputs=_token_inputs(hf, config.vocabulary),
        norms="both",
        embedding_scale=config.width**0.5,
        logits_cap=hf.number("final_logit_softcapping", 0.0),
        layer_scales=True,
    )


def _token_inputs(hf: HfConfig, vocabulary: int) -> int:
    assumed = 0 if "hidden_size_per_layer_input" in hf.fields else 256
    size = hf.count("hidden_size_per_layer_input", assumed, least=0)
    rows = hf.count("vocab_size_per_layer_input", 262144, least=0)
    if size and rows != vocabulary:
        raise hf.error(
            "vocab_size_per_layer_input",
            f"must equal vocab_size={vocabulary}",
            "tables of other sizes are not supported",
        )
    return size


def _sources(hf: HfConfig, windows: tuple[int | None, ...]) -> list[int | None]:
    """Returns, for each layer, the index of the layer whose keys and values it attends to, or None
    if it has its own."""
    own = len(windows) - hf.count("num_kv_shared_layers", 0, least=0)
    last = {window is None: at for at, window in enumerate(windows[: max(0, own)])}
    shared = [window is None for window in windows[max(0, own) :]]
    if not {*shared} <= last.keys():
        raise hf.error(
            "num_kv_shared_layers",
            "must leave keys and values to a layer of each kind",
            "models without them are not served",
        )
    return [None] * own + [last[kind] for kind in shared]


def _full(
    hf: HfConfig, windowed: AttentionConfig, windows: tuple[int | None, ...]
) -> AttentionConfig:
    same = hf.flag("attention_k_eq_v", False)
    heads, size = windowed.kv_heads, hf.count("global_head_dim", 512)
    given = hf.count("num_global_key_value_heads", heads)
    if same:
        heads = given
    by_layer = hf.raw("per_layer_config")
    if by_layer is not None:
        wanted = {at for at, window in enumerate(windows) if window is None}
        sizes = next(iter(by_layer.values()), {}) if isinstance(by_layer, dict) else None
        if not (
            isinstance(by_layer, dict)
            and isinstance(sizes, dict)
            and sizes.keys() <= {"head_dim", "num_key_value_heads"}
            and all(each == sizes for each in by_layer.values())
            and _layer_numbers(by_layer) in (wanted, set())  # empty: all layers are of one size
        ):
            raise hf.error(
                "per_layer_config",
                "must give the same head_dim and num_key_value_heads to each layer without a"
                " window",
                "other sizes by layer are not supported",
            )
        own = HfConfig(sizes, f"{hf.where}: per_layer_config")
        size = own.count("head_dim", windowed.head_dim)
        heads = own.count("num_key_value_heads", windowed.kv_heads)
    if windowed.query_heads % heads or size % 2:
        raise hf.error(
            "num_global_key_value_heads",
            f"must divide num_attention_heads={windowed.query_heads}, with heads of an even size"
            f" ({heads} kv heads of {size})",
            "correct it",
        )
    return replace(windowed, kv_heads=heads, head_dim=size, keys_are_values=same)


def _layer_numbers(by_layer: Mapping[object, object]) -> set[int] | None:
    keys = [str(key) for key in by_layer]
    return {int(key) for key in keys} if all(map(str.isdecimal, keys)) else None


def _experts(hf: HfConfig, ffn: int) -> ExpertConfig | None:
    sizes = ("num_experts", "top_k_experts", "moe_intermediate_size")
    if not hf.flag("enable_moe_block", False):
        hf.pass_over(*sizes)
        return None
    total, chosen, width = (hf.count(field) for field in sizes)
    if chosen > total:
        raise hf.error("top_k_experts", f"must be at most num_experts={total}", "correct it")
    return ExpertConfig(
        total, chosen, width, True, shared_ffn=ffn, wide=True, clamp=GeluGate(), beside=True
    )
