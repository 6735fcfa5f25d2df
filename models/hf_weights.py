"""Which Hugging Face tensors make each of our parameters, and how to cut a slice of one out of
theirs.

Their matrices are [out, in], one tensor per expert, or (as transformers 5 keeps them in memory)
experts fused in one tensor with gate and up side by side. Ours are [in, out] or [out, in] and [E,
in, out]. A parameter may be padded beyond its tensor in the vocabulary: padding reads as zeros.
Tables here are literal; a slice is read without touching the rest."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from models.parameter_tree import ParameterShape

Index = tuple[slice, ...]
ReadTensor = Callable[[str, Index], np.ndarray]

STEM = {
    "embedding": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.kernel": "lm_head.weight",
}
LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "attention.q.kernel": "self_attn.q_proj.weight",
    "attention.q.bias": "self_attn.q_proj.bias",
    "attention.k.kernel": "self_attn.k_proj.weight",
    "attention.k.bias": "self_attn.k_proj.bias",
    "attention.v.kernel": "self_attn.v_proj.weight",
    "attention.v.bias": "self_attn.v_proj.bias",
    "attention.o.kernel": "self_attn.o_proj.weight",
    "attention.o.bias": "self_attn.o_proj.bias",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "mlp.gate.kernel": "mlp.gate_proj.weight",
    "mlp.gate.bias": "mlp.gate_proj.bias",
    "mlp.up.kernel": "mlp.up_proj.weight",
    "mlp.up.bias": "mlp.up_proj.bias",
    "mlp.down.kernel": "mlp.down_proj.weight",
    "mlp.down.bias": "mlp.down_proj.bias",
}
QWEN_EXPERTS = {
    "mlp.router": "mlp.gate.weight",
    "mlp.gate": "mlp.experts.{expert}.gate_proj.weight",
    "mlp.up": "mlp.experts.{expert}.up_proj.weight",
    "mlp.down": "mlp.experts.{expert}.down_proj.weight",
}
MIXTRAL_EXPERTS = {
    "mlp.router": "block_sparse_moe.gate.weight",
    "mlp.gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "mlp.up": "block_sparse_moe.experts.{expert}.w3.weight",
    "mlp.down": "block_sparse_moe.experts.{expert}.w2.weight",
}
FUSED_GATE_UP, FUSED_DOWN, FUSED_ROUTER = (
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
    "mlp.gate.weight",
)


class Source(Protocol):
    """Where one parameter comes from."""

    def needs(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors."""
        ...

    def read(self, tensor: ReadTensor, index: Index) -> np.ndarray:
        """The slice `index` of the parameter (in its own, padded coordinates), in the stored
        dtype."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """One tensor; `flipped` where the parameter is its transpose. `shape` is the tensor's."""

    name: str
    shape: tuple[int, ...]
    flipped: bool = False

    def needs(self) -> dict[str, tuple[int, ...]]:
        return {self.name: self.shape}

    def read(self, tensor: ReadTensor, index: Index) -> np.ndarray:
        theirs = index[::-1] if self.flipped else index
        found = tensor(self.name, theirs)
        lacking = tuple(
            (0, _length(part) - size) for part, size in zip(theirs, found.shape, strict=True)
        )
        if any(after for _, after in lacking):
            found = np.pad(found, lacking)
        return found.T if self.flipped else found


@dataclass(frozen=True, slots=True)
class PerExpert:
    """A stack [E, in, out] of tensors [out, in], one per expert; `pattern` holds '{expert}'."""

    pattern: str
    experts: int
    shape: tuple[int, ...]

    def needs(self) -> dict[str, tuple[int, ...]]:
        return {self.pattern.format(expert=expert): self.shape for expert in range(self.experts)}

    def read(self, tensor: ReadTensor, index: Index) -> np.ndarray:
        first, last, _ = index[0].indices(self.experts)
        theirs = index[:0:-1]
        return np.stack(
            [tensor(self.pattern.format(expert=expert), theirs).T for expert in range(first, last)]
        )


@dataclass(frozen=True, slots=True)
class Fused:
    """A stack [E, in, out] inside one tensor [E, out's, in], whose rows from `first_row` on are
    ours."""

    name: str
    shape: tuple[int, ...]
    first_row: int = 0

    def needs(self) -> dict[str, tuple[int, ...]]:
        return {self.name: self.shape}

    def read(self, tensor: ReadTensor, index: Index) -> np.ndarray:
        experts, into, out = index
        rows = slice(out.start + self.first_row, out.stop + self.first_row)
        return np.swapaxes(tensor(self.name, (experts, rows, into)), 1, 2)


def find_source(parameter: ParameterShape, vocabulary: int, present: frozenset[str]) -> Source:
    """The tensors of one parameter; `present` are the checkpoint's names, which decide between the
    forms of experts."""
    path, shape = parameter.path, parameter.shape
    if path[0] == "stem":
        return _stem_source(parameter, vocabulary)
    prefix, key = f"model.layers.{path[1]}.", ".".join(str(part) for part in path[2:])
    if key in LAYER:
        return _matrix(prefix + LAYER[key], shape, parameter.transposed)
    if key == "mlp.router":
        names = [prefix + table[key] for table in (QWEN_EXPERTS, MIXTRAL_EXPERTS)]
        return _matrix(next((name for name in names if name in present), names[0]), shape, False)
    experts, into, out = shape
    if key == "mlp.down" and prefix + FUSED_DOWN in present:
        return Fused(prefix + FUSED_DOWN, (experts, out, into))
    if key in ("mlp.gate", "mlp.up") and prefix + FUSED_GATE_UP in present:
        return Fused(
            prefix + FUSED_GATE_UP,
            (experts, 2 * out, into),
            first_row=out if key == "mlp.up" else 0,
        )
    mixtral = prefix + MIXTRAL_EXPERTS[key].format(expert=0) in present
    return PerExpert(
        prefix + (MIXTRAL_EXPERTS if mixtral else QWEN_EXPERTS)[key], experts, (out, into)
    )


def _stem_source(parameter: ParameterShape, vocabulary: int) -> Source:
    key, shape = ".".join(str(part) for part in parameter.path[1:]), parameter.shape
    if key == "embedding":
        return Whole(STEM[key], (vocabulary, shape[1]))
    if key == "head.kernel":
        width = shape[1] if parameter.transposed else shape[0]
        return Whole(STEM[key], (vocabulary, width), flipped=not parameter.transposed)
    return Whole(STEM[key], shape)


def _matrix(name: str, shape: tuple[int, ...], transposed: bool) -> Source:
    if len(shape) == 1 or transposed:
        return Whole(name, shape)
    return Whole(name, shape[::-1], flipped=True)


def _length(part: slice) -> int:
    return part.stop - part.start
