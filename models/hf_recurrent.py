"""Maps the parameters of recurrent layers to Hugging Face tensors.

Lightning attention (`models/lightning.py`) has one tensor for each parameter except the decays,
which are computed. Tensors of decays, which transformers saves in the model's type, are not
read."""

from collections.abc import Mapping

from models.decoder_config import DecoderConfig, DeltaConfig, LightningConfig, MambaConfig
from models.hf_sources import Computed, JoinedHeads, OneDimension, Rows, SomeRows, Source, Whole
from models.parameter_tree import ParameterShape

DELTA_PREFIX = "linear_attn."
DELTA_FUSED, DELTA_FUSED_SCALARS = "in_proj_qkvz.weight", "in_proj_ba.weight"
# Parameters that have a tensor of their own, which differs at most in the order of rows.
DELTA_TENSORS = {
    "attention.qkv.kernel": "in_proj_qkv.weight",
    "attention.gate.kernel": "in_proj_z.weight",
    "attention.write.kernel": "in_proj_b.weight",
    "attention.decay.kernel": "in_proj_a.weight",
    "attention.o.kernel": "out_proj.weight",
    "attention.norm.weight": "norm.weight",
    "attention.decay_bias": "dt_bias",
    "attention.decay_log": "A_log",
}


KDA_PREFIX = "self_attn."
KDA_TENSORS = {
    "attention.write.kernel": "b_proj.weight",
    "attention.decay.kernel": "f_proj.weight",
    "attention.gate.kernel": "g_proj.weight",
    "attention.decay.a.kernel": "f_a_proj.weight",
    "attention.decay.b.kernel": "f_b_proj.weight",
    "attention.gate.a.kernel": "g_a_proj.weight",
    "attention.gate.b.kernel": "g_b_proj.weight",
    "attention.o.kernel": "o_proj.weight",
    "attention.norm.weight": "o_norm.weight",
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
    delta, flipped, start = config.delta, not parameter.transposed, prefix + DELTA_PREFIX
    assert delta is not None, "this layer has a gated delta net"
    if delta.by_channel:
        return _kda_source(prefix + KDA_PREFIX, key, config.width, delta, found, parameter)
    channels = delta.key_heads * delta.group_channels
    if key == "attention.kernel":
        return SomeRows(start + "conv1d.weight", (channels, 1, delta.taps), _by_group(delta))
    values = delta.values_per_key * delta.value_dim
    if start + DELTA_FUSED in found and key in ("attention.qkv.kernel", "attention.gate.kernel"):
        size, gate = delta.group_channels + values, key == "attention.gate.kernel"
        first, count = (delta.group_channels, values) if gate else (0, delta.group_channels)
        shape = (delta.key_heads * size, config.width)
        return SomeRows(start + DELTA_FUSED, shape, _parts(delta, size, first, count), flipped)
    if start + DELTA_FUSED in found and key in ("attention.write.kernel", "attention.decay.kernel"):
        count = delta.values_per_key
        first = count if key == "attention.decay.kernel" else 0
        rows = _parts(delta, 2 * count, first, count)
        shape = (2 * delta.value_heads, config.width)
        return SomeRows(start + DELTA_FUSED_SCALARS, shape, rows, flipped)
    if key == "attention.qkv.kernel":
        return SomeRows(
            start + DELTA_TENSORS[key], (channels, config.width), _by_group(delta), flipped
        )
    if key.endswith(".kernel") and flipped:
        return Whole(start + DELTA_TENSORS[key], parameter.shape[::-1], flipped=True)
    return Whole(start + DELTA_TENSORS[key], parameter.shape)


def _kda_source(
    start: str,
    key: str,
    width: int,
    delta: DeltaConfig,
    found: Mapping[str, tuple[int, ...]],
    parameter: ParameterShape,
) -> Source:
    flipped, rows = not parameter.transposed, delta.key_heads * delta.key_dim
    if key in ("attention.qkv.kernel", "attention.kernel"):
        end, shape = ("proj", (rows, width)) if "qkv" in key else ("conv1d", (rows, 1, delta.taps))
        parts = tuple((f"{start}{name}_{end}.weight", shape) for name in "qkv")
        return JoinedHeads(parts, delta.key_heads, flipped and "qkv" in key)
    if key == "attention.decay_log" and len(found.get(start + "A_log", ())) != 1:
        return OneDimension(start + "A_log", (1, 1, delta.value_heads, 1), 2)
    if key.endswith(".kernel") and flipped:
        return Whole(start + KDA_TENSORS[key], parameter.shape[::-1], flipped=True)
    return Whole(start + KDA_TENSORS[key], parameter.shape)


def _parts(delta: DeltaConfig, size: int, first: int, count: int) -> tuple[int, ...]:
    return tuple(
        size * head + first + row for head in range(delta.key_heads) for row in range(count)
    )


def _by_group(delta: DeltaConfig) -> tuple[int, ...]:
    queries = delta.key_heads * delta.key_dim
    values = delta.values_per_key * delta.value_dim
    rows: list[int] = []
    for head in range(delta.key_heads):
        for start, size in ((0, delta.key_dim), (queries, delta.key_dim), (2 * queries, values)):
            rows += range(start + head * size, start + (head + 1) * size)
    return tuple(rows)


CONVOLUTION_PREFIX = "conv."
CONVOLUTION_INPUTS = ("write", "gate", "x")


def convolution_source(prefix: str, key: str, width: int, parameter: ParameterShape) -> Source:
    start, (part, _, kind) = prefix + CONVOLUTION_PREFIX, key.split(".", 1)[1].partition(".")
    flipped = not parameter.transposed
    if part in CONVOLUTION_INPUTS:
        first = width * CONVOLUTION_INPUTS.index(part)
        if kind == "bias":
            return SomeRows(
                start + "in_proj.bias", (3 * width,), tuple(range(first, first + width))
            )
        return Rows(start + "in_proj.weight", (3 * width, width), first, flipped)
    if part == "o":
        name = f"{start}out_proj.{'bias' if kind == 'bias' else 'weight'}"
        return Whole(name, parameter.shape, flipped and kind != "bias")
    if part == "kernel_bias":
        return Whole(start + "conv.bias", (width,))
    shape = (width, 1, parameter.shape[1])
    return SomeRows(start + "conv.weight", shape, tuple(range(width)))


MAMBA_PREFIXES = ("mamba.", "mixer.")  # Granite, Nemotron
MAMBA_TENSORS = {
    "norm.weight": "norm.weight",
    "step_bias": "dt_bias",
    "decay_log": "A_log",
    "skip": "D",
    "o.kernel": "out_proj.weight",
    "o.bias": "out_proj.bias",
}


def mamba_source(
    layer: str,
    key: str,
    config: DecoderConfig,
    found: Mapping[str, tuple[int, ...]],
    parameter: ParameterShape,
) -> Source:
    mamba, key = config.mamba, key.removeprefix("attention.")
    assert mamba is not None, "this layer has Mamba-2"
    start = next(
        (layer + name for name in MAMBA_PREFIXES if f"{layer}{name}D" in found), layer + "mamba."
    )
    values, channels = mamba.heads * mamba.head_dim, mamba.groups * mamba.group_channels
    if key in MAMBA_TENSORS:
        flipped = key == "o.kernel" and not parameter.transposed
        shape = parameter.shape[::-1] if flipped else parameter.shape
        return Whole(start + MAMBA_TENSORS[key], shape, flipped)
    part, _, kind = key.rpartition(".")
    if part in ("x_convolution", "bc_convolution"):
        rows = _shared(mamba, values) if part == "bc_convolution" else tuple(range(values))
        ends = {"kernel": ("weight", (1, mamba.taps)), "bias": ("bias", ())}
        end, rest = ends[kind]
        return SomeRows(f"{start}conv1d.{end}", (values + channels, *rest), rows)
    rows = {
        "gate": range(values),
        "x": range(values, 2 * values),
        "bc": _shared(mamba, 2 * values),
        "step": range(2 * values + channels, 2 * values + channels + mamba.heads),
    }[part]
    size = 2 * values + channels + mamba.heads
    if kind == "bias":
        return SomeRows(start + "in_proj.bias", (size,), tuple(rows))
    return SomeRows(
        start + "in_proj.weight", (size, config.width), tuple(rows), not parameter.transposed
    )


LIGHTNING_TENSORS = {
    "attention.qkv.kernel": "qkv_proj.weight",
    "attention.gate.kernel": "output_gate.weight",
    "attention.norm.weight": "norm.weight",
    "attention.o.kernel": "out_proj.weight",
}


def lightning_source(
    layer: int, key: str, lightning: LightningConfig, layers: int, parameter: ParameterShape
) -> Source:
    """The heads' decay rates form a geometric sequence, and later layers decay more slowly."""
    if key == "attention.decay":
        slower = 1 - layer / (layers - 1 + 1e-5) + 1e-5
        rates = (2 ** (-8 * (head + 1) / lightning.heads) for head in range(lightning.heads))
        return Computed(tuple(rate * slower for rate in rates))
    flipped = key.endswith(".kernel") and not parameter.transposed
    shape = parameter.shape[::-1] if flipped else parameter.shape
    return Whole(f"model.layers.{layer}.self_attn.{LIGHTNING_TENSORS[key]}", shape, flipped)


def _shared(mamba: MambaConfig, first: int) -> tuple[int, ...]:
    """In the tensor, b of all groups comes before c of all groups."""
    size, half = mamba.state_dim, mamba.groups * mamba.state_dim
    return tuple(
        first + part + size * group + row
        for group in range(mamba.groups)
        for part in (0, half)
        for row in range(size)
    )
