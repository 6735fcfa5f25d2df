"""Reads a quantized checkpoint like a float one: each matrix appears under its unquantized name and
is dequantized to float32 slice by slice. Tensor names show which matrices are quantized. All other
tensors are read unchanged."""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import product

import numpy as np

from jdisagg.errors import CheckpointError
from jdisagg.ops.quantized_weights import Weights
from models.quantization_config import StoredQuantization
from models.safetensors_files import SafetensorsFiles
from models.stored_forms import (
    WORD_BITS,
    AwqMatrix,
    Fp4Matrix,
    GptqMatrix,
    Mxfp4Matrix,
    PackedMatrix,
    ScaledMatrix,
    StoredMatrix,
)

Index = tuple[slice, ...]
Find = Callable[[SafetensorsFiles, StoredQuantization], dict[str, StoredMatrix]]
_EIGHT_BITS = ("I8", "F8_E4M3")
_SCALES = ("F32", "F16", "BF16", "F8_E8M0")
_INTEGERS = ("I8", "U8", "I32", "I64")
# Tensors that are not parameters: scales of activations, and shapes.
_BESIDE = re.compile(
    r"(\.|_)(input_scale|input_global_scale|input_zero_point|activation_scale|output_scale"
    r"|weight_shape)$"
)
_LISTED = 5
_AT_ONCE = 1 << 22  # values


class QuantizedFiles:
    """Raises CheckpointError with the missing and wrongly shaped tensors of quantized matrices."""

    def __init__(self, files: SafetensorsFiles, stated: StoredQuantization, where: str) -> None:
        self._files = files
        self._matrices = _FINDERS[stated.method](files, stated)
        self._shapes = files.shapes()
        used = _checked(self._matrices, files, where)
        self._plain = {
            name for name in self._shapes if name not in used and not _BESIDE.search(name)
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        plain = {name: self._shapes[name] for name in self._plain}
        return plain | {name: matrix.shape for name, matrix in self._matrices.items()}

    def kinds(self, *, but: tuple[str, ...] = ()) -> set[str]:
        return self._files.kinds(but=but)

    def unreadable(self) -> list[str]:
        found = self._files.unreadable()
        return [text for text in found if text.rpartition(" (")[0] in self._plain]

    @property
    def total_bytes(self) -> int:
        return self._files.total_bytes

    def read(self, name: str, index: Index) -> np.ndarray:
        """Reads a slice in the stored type, or float32 for a quantized matrix."""
        if name in self._plain:
            return self._files.read(name, index)
        matrix = self._matrices[name]
        bounds = [part.indices(size) for part, size in zip(index, matrix.shape, strict=True)]
        inside = tuple(slice(start, max(start, stop), step) for start, stop, step in bounds)
        whole = np.empty([len(range(*bound)) for bound in bounds], np.float32)
        if whole.size:
            for ours, theirs in _pieces(inside, whole.shape):
                whole[ours] = matrix.restored(self._files, theirs)
        return whole

    def kept(self, names: Iterable[str], weights: Weights) -> bool:
        """Whether all matrices `names` are already stored in the quantized type `weights`, so that
        they can be used without dequantizing."""
        matrices = [self._matrices.get(name) for name in names]
        return all(
            isinstance(each, ScaledMatrix | PackedMatrix) and each.kept == weights
            for each in matrices
        )

    def numbers(self, name: str, index: Index) -> np.ndarray:
        return self._keepable(name).numbers(self._files, index)

    def scales(self, name: str, index: Index) -> np.ndarray:
        return self._keepable(name).scales(self._files, index)

    def _keepable(self, name: str) -> ScaledMatrix | PackedMatrix:
        matrix = self._matrices[name]
        assert isinstance(matrix, ScaledMatrix | PackedMatrix), f"{name} does not pass `kept`"
        return matrix


def _pieces(inside: Index, shape: tuple[int, ...]) -> Iterator[tuple[Index, Index]]:
    """Splits a slice into pieces, because dequantizing needs several times the memory of the
    result."""
    experts, (rows, columns) = inside[:-2], inside[-2:]
    at_once = max(1, _AT_ONCE // shape[-1])
    stack = range(experts[0].start, experts[0].stop) if experts else (None,)
    for expert, first in product(stack, range(rows.start, rows.stop, at_once)):
        last = min(first + at_once, rows.stop)
        ours: Index = (slice(first - rows.start, last - rows.start), slice(None))
        theirs: Index = (slice(first, last), columns)
        if expert is not None:
            at = expert - experts[0].start
            ours, theirs = (slice(at, at + 1), *ours), (slice(expert, expert + 1), *theirs)
        yield ours, theirs


def _checked(matrices: dict[str, StoredMatrix], files: SafetensorsFiles, where: str) -> set[str]:
    shapes = files.shapes()
    needed = {name: kept for matrix in matrices.values() for name, kept in matrix.needs().items()}
    wrong = [
        f"{name} is {f'of shape {shapes[name]}' if name in shapes else 'missing'}, not {kept[0]}"
        for name, kept in needed.items()
        if shapes.get(name) not in kept
    ]
    wrong += [
        f"{name} is of type {files.kind(name)}, not {' or '.join(_kinds(matrix, name))}"
        for matrix in matrices.values()
        for name in matrix.needs()
        if name in shapes and files.kind(name) not in _kinds(matrix, name)
    ]
    if wrong:
        more = f" and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        raise CheckpointError(
            f"{where}: quantized matrices lack what restores them: {', '.join(wrong[:_LISTED])}"
            f"{more}; fetch the checkpoint again"
        )
    return set(needed)


def _kinds(matrix: StoredMatrix, name: str) -> tuple[str, ...]:
    if isinstance(matrix, Mxfp4Matrix):
        return ("U8",)
    if isinstance(matrix, Fp4Matrix) and name != matrix.whole:
        return ("F8_E4M3",) if matrix.whole and name == matrix.scale else ("U8",)
    if name.endswith(("_scale", "_scale_2", "_scale_inv", ".scales")):
        return _SCALES
    if name.endswith("g_idx"):
        return _INTEGERS
    if isinstance(matrix, ScaledMatrix):
        return _EIGHT_BITS if name == matrix.values else _INTEGERS
    return ("I32",)


def _scaled(files: SafetensorsFiles, stated: StoredQuantization) -> dict[str, StoredMatrix]:
    shapes, found = files.shapes(), {}
    inverse = any(name.endswith("_scale_inv") for name in shapes)
    ends = ("_scale_inv", "_scale") if inverse else ("_scale",)
    for name, shape in shapes.items():
        if len(shape) < 2 or files.kind(name) not in _EIGHT_BITS:
            continue
        if "zero_point" in name or name.endswith("_scale"):  # NVFP4's scales are fp8 too
            continue
        scale = next((name + end for end in ends if name + end in shapes), name + ends[0])
        zero_point = f"{name}_zero_point"
        several = [
            ScaledMatrix(
                name,
                scale,
                zero_point if zero_point in shapes else None,
                shape,
                (block[0] or shape[-2], block[1] or shape[-1]),
                files.kind(name) == "F8_E4M3",
            )
            for block in stated.blocks
        ]
        fitting = (each for each in several if shapes.get(scale) in each.needs()[each.scale])
        found[name] = next(fitting, several[0])
    return found


def _compressed(files: SafetensorsFiles, stated: StoredQuantization) -> dict[str, StoredMatrix]:
    shapes, found = files.shapes(), _scaled(files, stated)
    end = "weight_packed"
    for name in [name for name in shapes if name.endswith(f".{end}") and len(shapes[name]) == 2]:
        base, (out, words) = name.removesuffix(end), shapes[name]
        if files.kind(name) == "U8":
            found[f"{base}weight"] = _four_bit_floats(files, base)
            continue
        into = words * WORD_BITS // stated.bits[0] if stated.bits else words
        if f"{base}weight_shape" in shapes:
            into = _stated_inputs(files, f"{base}weight_shape")
        fits = [bits for bits in stated.bits if words == -(-into // (WORD_BITS // bits))]
        bits = fits[0] if fits else 4
        zeros = f"{base}weight_zero_point" in shapes
        order = stated.ordered or f"{base}weight_g_idx" in shapes
        several = [
            PackedMatrix(base, (out, into), bits, block[1] or into, zeros, order)
            for block in stated.blocks
        ]
        scale = f"{base}weight_scale"
        fitting = (each for each in several if shapes.get(scale) in each.needs()[scale])
        found[f"{base}weight"] = next(fitting, several[0])
    return found


def _four_bit_floats(files: SafetensorsFiles, base: str) -> Fp4Matrix:
    out, pairs = files.shapes()[f"{base}weight_packed"]
    scale = f"{base}weight_scale"
    powers = scale in files.shapes() and files.kind(scale) == "U8"
    whole = "" if powers else f"{base}weight_global_scale"
    return Fp4Matrix(f"{base}weight_packed", scale, (out, 2 * pairs), whole, divided=True)


def _modelopt(files: SafetensorsFiles, stated: StoredQuantization) -> dict[str, StoredMatrix]:
    found = _scaled(files, stated)
    for name, shape in files.shapes().items():
        if name.endswith(".weight") and len(shape) == 2 and files.kind(name) == "U8":
            whole = (shape[0], 2 * shape[1])
            found[name] = Fp4Matrix(name, f"{name}_scale", whole, f"{name}_scale_2")
    return found


def _stated_inputs(files: SafetensorsFiles, name: str) -> int:
    """Returns the number of inputs of a packed matrix, which the file stores separately. The packed
    shape does not determine this number, because the last word may be only partly used."""
    stated = files.raw(name).reshape(-1) if files.kind(name) in _INTEGERS else np.empty(0)
    if stated.size != 2 or not np.all(stated > 0):
        raise CheckpointError(
            f"{name} must be two positive integers, got {files.kind(name)} of shape"
            f" {files.shapes()[name]} {stated.tolist()[:_LISTED]}; fetch the checkpoint again"
        )
    return int(stated[1])


def _awq(files: SafetensorsFiles, stated: StoredQuantization) -> dict[str, StoredMatrix]:
    found: dict[str, StoredMatrix] = {}
    for base, (into, words) in _qweights(files).items():
        found[f"{base}weight"] = AwqMatrix(base, (8 * words, into), stated.blocks[0][1] or into)
    return found


def _gptq(files: SafetensorsFiles, stated: StoredQuantization) -> dict[str, StoredMatrix]:
    shapes, (bits,) = files.shapes(), stated.bits
    found: dict[str, StoredMatrix] = {}
    for base, (words, out) in _qweights(files).items():
        into = words * WORD_BITS // bits
        group = stated.blocks[0][1] or into
        ordered = stated.ordered or f"{base}g_idx" in shapes
        added = 1 if stated.zeros_less_one else 0
        found[f"{base}weight"] = GptqMatrix(base, (out, into), bits, group, ordered, added)
    return found


def _mxfp4(files: SafetensorsFiles, stated: StoredQuantization) -> dict[str, StoredMatrix]:
    found: dict[str, StoredMatrix] = {}
    for name, shape in files.shapes().items():
        base, _, part = name.rpartition("_")
        if (part, len(shape)) not in (("blocks", 4), ("scales", 3)):
            continue
        experts, out, groups = shape[:3]
        found.setdefault(base, Mxfp4Matrix(base, (experts, groups * stated.blocks[0][1], out)))
    return found


def _qweights(files: SafetensorsFiles) -> dict[str, tuple[int, int]]:
    return {
        name.removesuffix("qweight"): (shape[0], shape[1])
        for name, shape in files.shapes().items()
        if name.endswith(".qweight") and len(shape) == 2
    }


_FINDERS: dict[str, Find] = {
    "fp8": _scaled,
    "fbgemm_fp8": _scaled,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
}
