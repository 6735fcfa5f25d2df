"""Reads the configuration of EXAONE 4. It has norms after blocks as in OLMo 2, and norms on each
head of q and k. The larger model has windows in most layers, and rotary positions only in these
layers. K-EXAONE has norms before blocks, and DeepSeek-V3's experts."""

from dataclasses import replace

from models.decoder_config import DecoderConfig
from models.glm4_moe import RoutingDefaults, read_experts
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, read_layer_types, read_window, with_windows
from models.hf_experts import sparse_layers, with_experts

DEFAULTS = FamilyDefaults(kv_heads=32, context_tokens=2048, norm_epsilon=1e-5)
ROUTING = RoutingDefaults(64, 8, 1024, scaling=2.5)


def read_config(hf: HfConfig) -> DecoderConfig:
    return replace(_read(hf), norms="after")


def read_moe_config(hf: HfConfig) -> DecoderConfig:
    stated = hf.raw("is_moe_layer")  # in the form published first
    if isinstance(stated, list):
        kinds = ["sparse" if sparse else "dense" for sparse in stated]
        hf = hf.changed(mlp_layer_types=hf.raw("mlp_layer_types") or kinds)
    hf.pass_over("first_last_k_dense_replace")
    hf = hf.renamed({"num_shared_experts": "n_shared_experts"})
    config = replace(_read(hf, last_full=False), left_aside=0, mtp_aside=True)
    return with_experts(hf, config, read_experts(hf, ROUTING), sparse_layers(hf, config, 1))


def _read(hf: HfConfig, *, last_full: bool = True) -> DecoderConfig:
    """`last_full`: a pattern of letters leaves the last layer without a window."""
    config = read_decoder(hf, DEFAULTS, qk_norm="head")
    count, window = len(config.layers), read_window(hf, 4096)
    pattern = hf.raw("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        local = [pattern[at % len(pattern)] == "L" for at in range(count)]
        local[-1] = local[-1] and not last_full
    else:
        every = hf.count("sliding_window_pattern", 4) if window else 1
        local = [(at + 1) % every != 0 for at in range(count)]
    windows = read_layer_types(hf, count, window, local)
    config = with_windows(config, windows)
    if window is None:
        return config
    layers = (replace(layer, rotated=layer.window is not None) for layer in config.layers)
    return replace(config, layers=tuple(layers))
