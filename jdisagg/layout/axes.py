"""Layouts (how a model is divided over devices), and the table that maps the logical axes of a
weight to mesh axes.

Letters of array dimensions in the whole project: B sequences, T tokens of a flattened step, L
layers, P pages, S slots of a page, N query heads, K kv heads, H head size, D model width, F ffn
width, E experts, V vocabulary, C chunk.

An instance has one or more pipeline stages, each with a range of consecutive layers and a mesh of
its own with the axes ("dp", "kv", "rep"). Tensor parallelism is split into two axes: kv heads are
sharded over `kv`. If tp exceeds the number of kv heads, they are also replicated over `rep`. All
other tensor-parallel dimensions are sharded over both axes, `kv` major. Does not import JAX."""

import re
from dataclasses import dataclass
from typing import Literal

from jdisagg.errors import LayoutError

MESH_AXES = ("dp", "kv", "rep")
TP_AXES = ("kv", "rep")

LogicalAxis = Literal[
    "vocab",
    "embed",
    "q_heads",
    "kv_heads",
    "head",
    "ffn",
    "expert",
    "expert_ffn",
    "router",
    "latent",
]


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """Model sizes that must be multiples of a layout's shard counts. `ffn` and `expert_ffn` are the
    widths of the dense feed-forward block and of one routed expert."""

    query_heads: int
    kv_heads: int
    ffn: int
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    state_key_heads: int = 0
    state_value_heads: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Placement of one model replica on pp * dp * tp devices.

    Attributes:
        dp: Number of data-parallel ranks, each with its own sequences.
        tp: Number of shards of attention heads, ffn and vocabulary.
        ep: Number of expert-parallel shards: 1, tp, or dp * tp. Experts use the same devices as
            attention. With 1, each expert is sharded over tp like the dense ffn.
        pp: Number of pipeline stages. Each stage has a mesh of dp * tp devices and a range of
            consecutive layers.
    """

    dp: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "ep", "pp"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise LayoutError(f"layout {name} must be a positive integer, got {value!r}")
        if self.ep not in (1, self.tp, self.dp * self.tp):
            raise LayoutError(
                f"layout ep={self.ep} must be 1, tp={self.tp} or dp*tp={self.dp * self.tp}: experts"
                " lie on the devices that attention uses"
            )

    @property
    def devices(self) -> int:
        return self.pp * self.stage_devices

    @property
    def stage_devices(self) -> int:
        return self.dp * self.tp

    def __str__(self) -> str:
        stages = f",pp={self.pp}" if self.pp > 1 else ""
        return f"dp={self.dp},tp={self.tp},ep={self.ep}{stages}"

    @classmethod
    def of(cls, layout: "Layout | str") -> "Layout":
        """Returns `layout` itself if it is a Layout, else the Layout that the text describes (see
        `parse`)."""
        return cls.parse(layout) if isinstance(layout, str) else layout

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Parses text such as 'dp=1,tp=2,ep=1' or 'pp=2,tp=2'. The order is free, and a missing
        size is 1."""
        sizes: dict[str, int] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            match = re.fullmatch(r"(dp|tp|ep|pp)=(\d+)", part)
            if not match or match[1] in sizes:
                how_many = "; how many workers: --prefill_workers, --decode_workers"
                raise LayoutError(
                    f"layout {text!r}: {part!r} is not one of dp=N, tp=N, ep=N, pp=N, each at most"
                    " once" + how_many * part.isdigit()
                )
            sizes[match[1]] = int(match[2])
        return cls(**sizes)

    def mesh_shape(self, kv_heads: int) -> tuple[int, int, int]:
        """Returns the sizes of the mesh axes ("dp", "kv", "rep") for this number of kv heads."""
        kv = min(self.tp, kv_heads)
        if self.tp % kv or kv_heads % kv:
            raise LayoutError(
                f"layout tp={self.tp} does not divide the model's {kv_heads} kv heads, nor they it;"
                f" choose a tp that divides {kv_heads} or is a multiple of it"
            )
        return self.dp, kv, self.tp // kv

    def check(self, geometry: ModelGeometry) -> None:
        """Raises `LayoutError` if a dimension of the model is not divisible by its number of
        shards."""
        _, kv, _ = self.mesh_shape(geometry.kv_heads)
        _divides(
            kv, geometry.state_key_heads, "share of kv heads", "key heads of layers with state"
        )
        _divides(self.tp, geometry.state_value_heads, "tp", "value heads of layers with state")
        _divides(self.tp, geometry.query_heads, "tp", "query heads")
        _divides(self.tp, geometry.ffn, "tp", "ffn width")
        _divides(self.tp, geometry.shared_ffn, "tp", "shared expert ffn width")
        if not geometry.experts:
            if self.ep not in (1, self.tp):
                raise LayoutError(f"layout ep={self.ep}: the model has no experts; use ep=1")
            return
        if self.ep > 1:
            _divides(self.ep, geometry.experts, "ep", "experts")
        else:
            _divides(self.tp, geometry.expert_ffn, "tp", "expert ffn width")

    def expert_axes(self) -> tuple[str, ...]:
        """Returns the mesh axes over which whole experts are distributed, empty if ep is 1."""
        if self.ep == 1:
            return ()
        return TP_AXES if self.ep == self.tp else MESH_AXES

    def axis_table(self) -> dict[str, tuple[str, ...]]:
        """Returns, for each logical axis, the mesh axes over which it is sharded. An empty tuple
        means that the axis is replicated."""
        experts = self.expert_axes()
        return {
            "vocab": TP_AXES,
            "embed": (),
            "q_heads": TP_AXES,
            "kv_heads": ("kv",),
            "head": (),
            "ffn": TP_AXES,
            "expert": experts,
            "expert_ffn": () if experts else TP_AXES,
            "router": (),
            "latent": (),
        }


def padded_vocabulary(vocabulary: int, tp: int) -> int:
    """Returns the vocabulary size, padded to a multiple of tp. Weight initialisation and sampling
    use only the unpadded rows."""
    return -(-vocabulary // tp) * tp


def _divides(divisor: int, number: int, divisor_name: str, number_name: str) -> None:
    if number % divisor:
        raise LayoutError(
            f"layout {divisor_name}={divisor} does not divide the model's {number} {number_name};"
            f" choose a divisor of {number}"
        )
