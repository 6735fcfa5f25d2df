"""Formats of quantized matrices in published checkpoints.

A matrix w [out, in] (or a stack [E, out, in] of `ScaledMatrix`) is stored as quantized numbers q.
Each block of numbers has one scale s and optionally one zero point z: w = (q - z) * s, computed in
float32. Any slice can be dequantized without reading the rest. Except where noted, numbers are
packed into int32 words, n per word, with number 0 in the lowest bits:

- `ScaledMatrix`: q has 8 bits, int8 or fp8 (e4m3), and is not packed. Used by DeepSeek's and Qwen's
  fp8 checkpoints with blocks of 128 x 128, and by compressed-tensors' int-quantized and
  float-quantized.
- `PackedMatrix`: compressed-tensors' pack-quantized. [out, in / n]: number i of a word is input n w
  + i, stored as q + 2^(bits - 1). Zero points are stored likewise, but packed over outputs.
- `AwqMatrix`: AutoAWQ's gemm, four bits. [in, out / 8]: number i of a word is output 8 w + (0, 2,
  4, 6, 1, 3, 5, 7)[i]. Zero points are packed likewise: [groups, out / 8].
- `GptqMatrix`: AutoGPTQ's. [in / n, out]: number i of a word is input n w + i. Zero points [groups,
  out / n], packed over outputs, are stored less one (except in gptq_v2). A tensor may give the
  scale group of each input.
- `Mxfp4Matrix`: gpt-oss's stacks of experts (OCP Microscaling Formats, 1.0). Bytes [E, out, in /
  32, 16], each with two neighbouring inputs, the first in its low half, as e2m1: a sign, and one of
  0, 0.5, 1, 1.5, 2, 3, 4, 6. s is two to the power of a byte less 127 for each 32 inputs.
- `Fp4Matrix`: bytes [out, in / 2] of e2m1 as before. NVFP4: s is e4m3 for each 16 inputs, times the
  matrix's own scale (ModelOpt), or divided by it (compressed-tensors). MXFP4 of compressed-tensors:
  s is two to the power of a byte less 127 for each 32 inputs."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jdisagg.errors import CheckpointError
from jdisagg.ops.quantized_weights import Weights
from models.safetensors_files import SafetensorsFiles

Index = tuple[slice, ...]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# The e2m1 value of each half byte, and the two values of each byte.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_E2M1_PAIRS = np.stack([_E2M1[np.arange(256) & 15], _E2M1[np.arange(256) >> 4]], axis=1)
_MXFP4_GROUP, NVFP4_GROUP = 32, 16
WORD_BITS = 32


class StoredMatrix(Protocol):
    """One quantized matrix of a checkpoint. `shape` is [out, in], or [E, out, in] for a stack of
    experts."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def needs(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Returns the names of the tensors that store the matrix, each with its permitted
        shapes."""
        ...

    def restored(self, files: SafetensorsFiles, index: Index) -> np.ndarray:
        """Dequantizes a slice of the matrix to float32. For `Mxfp4Matrix` the last part of the
        index may have a step, because gate and up are interleaved."""
        ...


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """A matrix of unpacked 8-bit numbers. `block` is the size (outputs, inputs) of the block that
    shares one scale. The last blocks may be smaller."""

    values: str
    scale: str
    zero_point: str | None
    shape: tuple[int, ...]
    block: tuple[int, int]
    fp8: bool

    def needs(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        grid = self._grid()
        shapes = [grid]
        if grid[-1] == 1:
            shapes += [grid[:-1], ()] if grid[-2] == 1 else [grid[:-1]]
        if len(grid) == 2 and min(self.block) > 1:
            shapes.append((grid[0], 1, grid[1], 1))  # ModelOpt's
        found: dict[str, tuple[tuple[int, ...], ...]] = {self.values: (self.shape,)}
        found[self.scale] = tuple(shapes)
        return found | ({self.zero_point: tuple(shapes)} if self.zero_point else {})

    def restored(self, files: SafetensorsFiles, index: Index) -> np.ndarray:
        whole = self.numbers(files, index).astype(np.float32)
        if self.zero_point:
            whole -= self._spread(files, self.zero_point, index)
        return whole * self.scales(files, index)

    @property
    def kept(self) -> Weights:
        """Quantized type in which the matrix can be used without dequantizing, or "". Requires one
        scale per output and no zero point."""
        if self.zero_point or self.block[1] < self.shape[-1]:
            return ""
        return "fp8" if self.fp8 else "int8"

    def numbers(self, files: SafetensorsFiles, index: Index) -> np.ndarray:
        return files.raw(self.values)[index]

    def scales(self, files: SafetensorsFiles, index: Index) -> np.ndarray:
        return self._spread(files, self.scale, index)

    def _grid(self) -> tuple[int, ...]:
        *stack, out, into = self.shape
        return (*stack, -(-out // self.block[0]), -(-into // self.block[1]))

    def _spread(self, files: SafetensorsFiles, name: str, index: Index) -> np.ndarray:
        grid = files.raw(name).reshape(self._grid())[index[:-2]]
        for axis, (part, size) in enumerate(zip(index[-2:], self.block, strict=True), -2):
            grid = np.take(grid, _positions(part) // size, axis)
        return grid.astype(np.float32)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix in compressed-tensors' format pack-quantized. `group` is the number of inputs that
    share a scale."""

    name: str
    shape: tuple[int, int]
    bits: int
    group: int
    zeros: bool
    ordered: bool

    def needs(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        (out, into), each = self.shape, WORD_BITS // self.bits
        groups = -(-into // self.group)
        found: dict[str, tuple[tuple[int, ...], ...]] = {
            f"{self.name}weight_packed": ((out, -(-into // each)),),
            f"{self.name}weight_scale": ((out, groups), (out,) if groups == 1 else (out, groups)),
        }
        if self.zeros:
            found[f"{self.name}weight_zero_point"] = ((-(-out // each), groups),)
        if self.ordered:
            found[f"{self.name}weight_g_idx"] = ((into,),)
        return found

    def restored(self, files: SafetensorsFiles, index: Index) -> np.ndarray:
        whole = self.numbers(files, index).astype(np.float32)
        if self.zeros:
            zeros = unpacked(files.raw(f"{self.name}weight_zero_point"), self.bits, 0, index[0])
            zeros = zeros.astype(np.int16) - self._middle
            whole -= _of_groups(zeros, self._groups(files, index), 1, self.name)
        return whole * self.scales(files, index)

    @property
    def kept(self) -> Weights:
        if self.zeros or self.group < self.shape[1] or self.bits not in (4, 8):
            return ""
        return "int4" if self.bits == 4 else "int8"

    def numbers(self, files: SafetensorsFiles, index: Index) -> np.ndarray:
        words = files.raw(f"{self.name}weight_packed")[index[0]]
        wide = unpacked(words, self.bits, 1, index[1]).astype(np.int16)
        return (wide - self._middle).astype(np.int8)

    def scales(self, files: SafetensorsFiles, index: Index) -> np.ndarray:
        scale = files.raw(f"{self.name}weight_scale").reshape(self.shape[0], -1)
        return _of_groups(scale[index[0]], self._groups(files, index), 1, self.name)

    @property
    def _middle(self) -> int:
        return 1 << (self.bits - 1)

    def _groups(self, files: SafetensorsFiles, index: Index) -> np.ndarray:
        if self.ordered:
            return files.raw(f"{self.name}weight_g_idx")[index[1]]
        return _positions(index[1]) // self.group


@dataclass(frozen=True, slots=True)
class AwqMatrix:
    """A matrix in AutoAWQ's format. `group` is the number of inputs that share a scale."""

    name: str
    shape: tuple[int, int]
    group: int

    def needs(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        (out, into), words = self.shape, self.shape[0] // 8
        groups = -(-into // self.group)
        return {
            f"{self.name}qweight": ((into, words),),
            f"{self.name}qzeros": ((groups, words),),
            f"{self.name}scales": ((groups, out),),
        }

    def restored(self, files: SafetensorsFiles, index: Index) -> np.ndarray:
        out, into = index
        groups = _positions(into) // self.group
        words = files.raw(f"{self.name}qweight")[into]
        whole = unpacked(words, 4, 1, out, _AWQ_ORDER).astype(np.float32)
        zeros = unpacked(files.raw(f"{self.name}qzeros"), 4, 1, out, _AWQ_ORDER)
        whole -= _of_groups(zeros, groups, 0, self.name)
        scale = files.raw(f"{self.name}scales")[:, out]
        return (whole * _of_groups(scale, groups, 0, self.name)).T


@dataclass(frozen=True, slots=True)
class GptqMatrix:
    """A matrix in AutoGPTQ's format. `group` is the number of consecutive inputs that share a
    scale. With `ordered`, the tensor `g_idx` gives each input's group instead. `added` (0 or 1) is
    added to stored zero points."""

    name: str
    shape: tuple[int, int]
    bits: int
    group: int
    ordered: bool
    added: int

    def needs(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        (out, into), each = self.shape, WORD_BITS // self.bits
        groups = -(-into // self.group)
        found: dict[str, tuple[tuple[int, ...], ...]] = {
            f"{self.name}qweight": ((into // each, out),),
            f"{self.name}qzeros": ((groups, out // each),),
            f"{self.name}scales": ((groups, out),),
        }
        return found | ({f"{self.name}g_idx": ((into,),)} if self.ordered else {})

    def restored(self, files: SafetensorsFiles, index: Index) -> np.ndarray:
        out, into = index
        groups = _positions(into) // self.group
        if self.ordered:
            groups = files.raw(f"{self.name}g_idx")[into]
        words = files.raw(f"{self.name}qweight")[:, out]
        whole = unpacked(words, self.bits, 0, into).astype(np.float32)
        zeros = unpacked(files.raw(f"{self.name}qzeros"), self.bits, 1, out)
        zeros = zeros.astype(np.int16) + self.added
        whole -= _of_groups(zeros, groups, 0, self.name)
        scale = files.raw(f"{self.name}scales")[:, out]
        return (whole * _of_groups(scale, groups, 0, self.name)).T


@dataclass(frozen=True, slots=True)
class Mxfp4Matrix:
    """gpt-oss's expert matrices [E, in, out], which are stored with the last two dimensions
    swapped. `name` is the tensors' common prefix, before _blocks and _scales."""

    name: str
    shape: tuple[int, int, int]

    def needs(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        experts, into, out = self.shape
        grid = (experts, out, into // _MXFP4_GROUP)
        half = _MXFP4_GROUP // 2
        return {f"{self.name}_blocks": ((*grid, half),), f"{self.name}_scales": (grid,)}

    def restored(self, files: SafetensorsFiles, index: Index) -> np.ndarray:
        experts, into, out = index
        first = into.start // _MXFP4_GROUP
        groups = slice(first, -(-into.stop // _MXFP4_GROUP))
        scales = files.raw(f"{self.name}_scales")[experts, out, groups]
        wide = _E2M1_PAIRS[files.raw(f"{self.name}_blocks")[experts, out, groups]]
        wide = wide.reshape(*scales.shape, _MXFP4_GROUP)
        wide *= np.ldexp(np.float32(1), scales.astype(np.int32) - 127)[..., None]
        inside = slice(into.start - first * _MXFP4_GROUP, into.stop - first * _MXFP4_GROUP)
        return np.swapaxes(wide.reshape(*scales.shape[:2], -1)[..., inside], 1, 2)


@dataclass(frozen=True, slots=True)
class Fp4Matrix:
    """A matrix of e2m1 numbers, in NVFP4 or MXFP4.

    Attributes:
        whole: Name of the tensor with the scale of the whole matrix. Empty means MXFP4.
        divided: Whether scales are divided by the scale of the whole matrix.
    """

    values: str
    scale: str
    shape: tuple[int, int]
    whole: str
    divided: bool = False

    @property
    def group(self) -> int:
        return NVFP4_GROUP if self.whole else _MXFP4_GROUP

    def needs(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        out, into = self.shape
        found: dict[str, tuple[tuple[int, ...], ...]] = {
            self.values: ((out, into // 2),),
            self.scale: ((out, -(-into // self.group)),),
        }
        return found | ({self.whole: ((), (1,))} if self.whole else {})

    def restored(self, files: SafetensorsFiles, index: Index) -> np.ndarray:
        out, into = index
        first = into.start // 2
        pairs = files.raw(self.values)[out, first : -(-into.stop // 2)]
        numbers = _E2M1_PAIRS[pairs].reshape(pairs.shape[0], -1)
        numbers = numbers[:, into.start - 2 * first : into.stop - 2 * first]
        scale = files.raw(self.scale)[out]
        if self.whole:
            scale, whole = scale.astype(np.float32), files.raw(self.whole).astype(np.float32)
            scale = scale / whole.reshape(()) if self.divided else scale * whole.reshape(())
        else:
            scale = np.ldexp(np.float32(1), scale.astype(np.int32) - 127)
        return numbers * np.take(scale, _positions(into) // self.group, 1)


def unpacked(
    words: np.ndarray, bits: int, axis: int, part: slice, order: tuple[int, ...] = ()
) -> np.ndarray:
    """Returns the slice `part` of the unpacked axis as uint8. `order[i]` is the index of the number
    in a word's i-th field from the low end; empty means i."""
    each = WORD_BITS // bits
    first = part.start // each
    cut = slice(first, -(-part.stop // each))
    mine = np.ascontiguousarray(words[:, cut] if axis else words[cut])
    rows, columns = mine.shape
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    numbers = (mine.view(np.uint8).reshape(rows, columns, 4, 1) >> shifts) & ((1 << bits) - 1)
    numbers = numbers.reshape(rows, columns, each)
    if order:
        numbers = numbers[..., np.argsort(order)]
    inside = slice(part.start - first * each, part.stop - first * each)
    if axis:
        return numbers.reshape(rows, columns * each)[:, inside]
    return numbers.transpose(0, 2, 1).reshape(rows * each, columns)[inside]


def _of_groups(grid: np.ndarray, groups: np.ndarray, axis: int, name: str) -> np.ndarray:
    if groups.size and not 0 <= groups.min() <= groups.max() < grid.shape[axis]:
        raise CheckpointError(
            f"{name}g_idx must name groups from 0 to {grid.shape[axis] - 1}, got {groups.min()} to"
            f" {groups.max()}; fetch the checkpoint again"
        )
    return np.take(grid, groups, axis).astype(np.float32)


def _positions(part: slice) -> np.ndarray:
    return np.arange(part.start, part.stop)
