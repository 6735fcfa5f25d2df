"""Quantizes matrices while they are read from a float checkpoint. If the checkpoint is already
quantized in the requested format, its values are used as stored.

Each output of a matrix has one scale, computed over all inputs. Even a device that stores only some
of the inputs reads all of them, so that quantized values do not depend on the layout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from jdisagg.layout.reshard_plan import Box, box_of
from jdisagg.ops.quantized_weights import Weights, pack_pairs, quantized
from models.decoder import Decoder
from models.hf_sources import Index, ReadTensor, Source
from models.parameter_tree import ParameterPath, ParameterShape, parameter_shapes
from models.quantized_files import QuantizedFiles
from models.safetensors_files import CheckpointTensors

Bounds = tuple[tuple[int, int], ...]


@dataclass
class _Matrix:
    source: Source
    shape: tuple[int, ...]
    inputs: int
    weights: Weights
    paired: bool
    stored: QuantizedFiles | None = None
    kept: dict[Bounds, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def of(self, tensor: ReadTensor, outputs: Index) -> tuple[np.ndarray, np.ndarray]:
        bounds = tuple((part.start, part.stop) for part in outputs)
        if bounds not in self.kept:
            self.kept[bounds] = self._quantized(tensor, outputs)
        return self.kept[bounds]

    def _quantized(self, tensor: ReadTensor, outputs: Index) -> tuple[np.ndarray, np.ndarray]:
        parts = [self._one(tensor, index) for index in self.indices(outputs)]
        if len(self.shape) == 2:
            return parts[0]
        values, scales = zip(*parts, strict=True)
        return np.concatenate(values), np.concatenate(scales)

    def indices(self, outputs: Index) -> list[Index]:
        whole = list(outputs)
        whole.insert(self.inputs, slice(0, self.shape[self.inputs]))
        if len(self.shape) == 2:
            return [tuple(whole)]
        experts = range(whole[0].start, whole[0].stop)
        return [(slice(expert, expert + 1), *whole[1:]) for expert in experts]

    def _one(self, tensor: ReadTensor, index: Index) -> tuple[np.ndarray, np.ndarray]:
        axis = self.inputs
        if self.stored is None:
            values, scale = quantized(self.source.read(tensor, index), axis, self.weights)
        else:
            values = self.source.read(self.stored.numbers, index)
            of_one_input = (*index[:axis], slice(0, 1), *index[axis + 1 :])
            scale = self.source.read(self.stored.scales, of_one_input).squeeze(axis)
            values = values.astype(ml_dtypes.int4) if self.weights == "int4" else values
        return (pack_pairs(values, axis) if self.paired else values), scale


@dataclass(frozen=True, slots=True)
class _Values:
    matrix: _Matrix
    kind: np.dtype

    def needs(self) -> dict[str, tuple[int, ...]]:
        return self.matrix.source.needs()

    def read(self, tensor: ReadTensor, index: Index) -> np.ndarray:
        inputs = self.matrix.inputs
        values, _ = self.matrix.of(tensor, index[:inputs] + index[inputs + 1 :])
        own = values[(slice(None),) * inputs + (index[inputs],)]
        return own.view(self.kind) if self.kind == np.uint8 else own


@dataclass(frozen=True, slots=True)
class _Scales:
    matrix: _Matrix

    def needs(self) -> dict[str, tuple[int, ...]]:
        return self.matrix.source.needs()

    def read(self, tensor: ReadTensor, index: Index) -> np.ndarray:
        return self.matrix.of(tensor, index)[1]


def quantized_sources(
    model: Decoder,
    floats: Mapping[ParameterPath, tuple[ParameterShape, Source]],
    files: CheckpointTensors,
) -> list[Source]:
    """Returns where each parameter of a quantized model is read from. The result is in the order of
    `jax.tree.leaves`, where quantized values come before their scales. `floats` are the sources of
    the model without quantization."""
    stored = files if isinstance(files, QuantizedFiles) else None
    matrices: dict[ParameterPath, _Matrix] = {}
    sources: list[Source] = []
    for parameter in parameter_shapes(model):
        of = _owner(parameter.path)
        if of in matrices:
            sources.append(_Scales(matrices[of]))
            continue
        plain, source = floats[parameter.path]
        if parameter.dtype != plain.dtype:
            inputs = len(plain.shape) - (1 if plain.transposed else 2)
            paired = parameter.shape != plain.shape
            kept = stored and stored.kept(source.needs(), model.weights)
            own = stored if kept else None
            matrix = _Matrix(source, plain.shape, inputs, model.weights, paired, own)
            matrices[parameter.path] = matrix
            source = _Values(matrix, parameter.dtype)
        sources.append(source)
    return sources


def _owner(path: ParameterPath) -> ParameterPath:
    last = str(path[-1])
    if last == "scale":
        return (*path[:-1], "kernel")
    return (*path[:-1], last.removesuffix("_scale")) if last.endswith("_scale") else ()


def planned_reads(
    sources: Sequence[Source],
    shapes: Sequence[tuple[int, ...]],
    shardings: Sequence[Any],
    tensors: Mapping[str, tuple[int, ...]],
) -> list[tuple[str, Box]]:
    reads: list[tuple[str, Box]] = []

    def note(name: str, index: Index) -> np.ndarray:
        shape = tensors[name]
        whole = (*index, *(slice(None),) * (len(shape) - len(index)))
        reads.append((name, box_of(whole, shape)))
        sizes = [len(range(*part.indices(size))) for part, size in zip(whole, shape, strict=True)]
        return np.broadcast_to(np.int8(0), sizes)

    for source, shape, sharding in zip(sources, shapes, shardings, strict=True):
        plain = getattr(sharding, "sharding", sharding)  # of a format with an order of axes
        indices = plain.addressable_devices_indices_map(shape).values()
        whole = (slice(None),) * len(shape)
        boxes = list(dict.fromkeys(box_of(index or whole, shape) for index in indices))
        if isinstance(source, _Scales) or not source.needs():
            continue  # read with the values, or not from these tensors
        if isinstance(source, _Values):
            at, matrix = source.matrix.inputs, source.matrix
            outputs = dict.fromkeys(box[:at] + box[at + 1 :] for box in boxes)
            parts = [one for box in outputs for one in matrix.indices(_slices(box))]
            source = matrix.source
        else:
            parts = list(map(_slices, boxes))
        for part in parts:
            source.read(note, part)
    return reads


def _slices(box: Box) -> Index:
    return tuple(slice(*bounds) for bounds in box)
