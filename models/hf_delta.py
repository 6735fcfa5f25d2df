"""Which Hugging Face tensors make the parameters of Gated DeltaNet (`models/gated_delta.py`), where
what belongs to one key head lies together.

Qwen3-Next has one tensor for queries, keys, values and gate, in which it does, and one for the two
scalars of each value head; Qwen3.5 has a tensor for queries, keys and values, all heads' of each
side by side, and one for each of the others. The convolution of both is as Qwen3.5's."""

from collections.abc import Mapping

from models.decoder_config import DecoderConfig, DeltaConfig
from models.hf_sources import SomeRows, Source, Whole
from models.parameter_tree import ParameterShape

PREFIX = "linear_attn."
FUSED, FUSED_SCALARS = "in_proj_qkvz.weight", "in_proj_ba.weight"
# What has a tensor of its own, but for the order of its rows.
OWN = {
    "attention.qkv.kernel": "in_proj_qkv.weight",
    "attention.gate.kernel": "in_proj_z.weight",
    "attention.write.kernel": "in_proj_b.weight",
    "attention.decay.kernel": "in_proj_a.weight",
    "attention.o.kernel": "out_proj.weight",
    "attention.norm.weight": "norm.weight",
    "attention.decay_bias": "dt_bias",
    "attention.decay_log": "A_log",
}


def delta_source(
    prefix: str,
    key: str,
    config: DecoderConfig,
    found: Mapping[str, tuple[int, ...]],
    parameter: ParameterShape,
) -> Source:
    """The tensor of one parameter of a layer, whose names begin with `prefix`."""
    delta, flipped, start = config.delta, not parameter.transposed, prefix + PREFIX
    assert delta is not None, "a layer has it"
    channels = delta.key_heads * delta.group_channels
    if key == "attention.kernel":
        return SomeRows(start + "conv1d.weight", (channels, 1, delta.taps), _by_group(delta))
    values = delta.values_per_key * delta.value_dim
    if start + FUSED in found and key in ("attention.qkv.kernel", "attention.gate.kernel"):
        size, gate = delta.group_channels + values, key == "attention.gate.kernel"
        first, count = (delta.group_channels, values) if gate else (0, delta.group_channels)
        shape = (delta.key_heads * size, config.width)
        return SomeRows(start + FUSED, shape, _parts(delta, size, first, count), flipped)
    if start + FUSED in found and key in ("attention.write.kernel", "attention.decay.kernel"):
        count = delta.values_per_key
        first = count if key == "attention.decay.kernel" else 0
        rows = _parts(delta, 2 * count, first, count)
        shape = (2 * delta.value_heads, config.width)
        return SomeRows(start + FUSED_SCALARS, shape, rows, flipped)
    if key == "attention.qkv.kernel":
        return SomeRows(start + OWN[key], (channels, config.width), _by_group(delta), flipped)
    if key.endswith(".kernel") and flipped:
        return Whole(start + OWN[key], parameter.shape[::-1], flipped=True)
    return Whole(start + OWN[key], parameter.shape)


def _parts(delta: DeltaConfig, size: int, first: int, count: int) -> tuple[int, ...]:
    """Of each key head's `size` rows, `count` from `first` on."""
    return tuple(
        size * head + first + row for head in range(delta.key_heads) for row in range(count)
    )


def _by_group(delta: DeltaConfig) -> tuple[int, ...]:
    """The rows of all queries, keys and values, in the order of the heads they belong to."""
    queries = delta.key_heads * delta.key_dim
    values = delta.values_per_key * delta.value_dim
    rows: list[int] = []
    for head in range(delta.key_heads):
        for start, size in ((0, delta.key_dim), (queries, delta.key_dim), (2 * queries, values)):
            rows += range(start + head * size, start + (head + 1) * size)
    return tuple(rows)
