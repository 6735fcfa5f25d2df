"""Which Hugging Face tensors make the parameters of Mamba-2 (`models/mamba2.py`): one that all that
goes in has in common (gate, x, all groups' b, all groups' c, a step for each head), one for the
convolution over x, b and c, and one for each of the others. What a group shares lies together
here, b before c."""

from collections.abc import Mapping

from models.decoder_config import DecoderConfig, MambaConfig
from models.hf_sources import SomeRows, Source, Whole
from models.parameter_tree import ParameterShape

PREFIXES = ("mamba.", "mixer.")  # of Granite, of Nemotron
OWN = {
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
    """The tensor of one parameter of a layer, whose names begin with `layer`."""
    mamba, key = config.mamba, key.removeprefix("attention.")
    assert mamba is not None, "a layer has it"
    start = next(
        (layer + name for name in PREFIXES if f"{layer}{name}D" in found), layer + "mamba."
    )
    values, channels = mamba.heads * mamba.head_dim, mamba.groups * mamba.group_channels
    if key in OWN:
        flipped = key == "o.kernel" and not parameter.transposed
        shape = parameter.shape[::-1] if flipped else parameter.shape
        return Whole(start + OWN[key], shape, flipped)
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


def _shared(mamba: MambaConfig, first: int) -> tuple[int, ...]:
    """The rows of each group's b and c, where all groups' b lie before all groups' c."""
    size, half = mamba.state_dim, mamba.groups * mamba.state_dim
    return tuple(
        first + part + size * group + row
        for group in range(mamba.groups)
        for part in (0, half)
        for row in range(size)
    )
