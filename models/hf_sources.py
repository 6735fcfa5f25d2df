"""Reads slices of parameters from Hugging Face tensors, without reading the rest of a tensor.

Matrices in Hugging Face files are [out, in]. Our parameters are [in, out] or [out, in], and [E, in,
out] for experts. A parameter's vocabulary may be padded beyond its tensor; padding is read as
zeros."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Index = tuple[slice, ...]
ReadTensor = Callable[[str, Index], np.ndarray]


class Source(Protocol):
    def needs(self) -> dict[str, tuple[int, ...]]:
        """Returns names and shapes of the tensors."""
        ...

    def read(self, tensor: ReadTensor, index: Index) -> np.ndarray:
        """Reads the slice `index` of the (padded) parameter in the stored dtype."""
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    """A parameter that equals one whole tensor of `shape`, or its transpose if `flipped`."""

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
class Computed:
    """A vector parameter of float32 values that are computed from the configuration, and are not
    stored in a tensor."""

    values: tuple[float, ...]

    def needs(self) -> dict[str, tuple[int, ...]]:
        return {}

    def read(self, tensor: ReadTensor, index: Index) -> np.ndarray:
        return np.array(self.values, np.float32)[index]


@dataclass(frozen=True, slots=True)
class OneDimension:
    """A parameter that is dimension `axis` of a tensor whose other dimensions have size one."""

    name: str
    shape: tuple[int, ...]
    axis: int

    def needs(self) -> dict[str, tuple[int, ...]]:
        return {self.name: self.shape}

    def read(self, tensor: ReadTensor, index: Index) -> np.ndarray:
        theirs = [slice(0, 1)] * len(self.shape)
        theirs[self.axis] = index[0]
        return tensor(self.name, tuple(theirs)).reshape(-1)


@dataclass(frozen=True, slots=True)
class PerExpert:
    """A parameter [E, in, out] that stacks one tensor [out, in] per expert. `pattern` contains
    '{expert}'."""

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
class Rows:
    """A matrix that consists of consecutive rows of one tensor [rows, in], from `first_row` on.
    `flipped` means that the parameter is [in, out]."""

    name: str
    shape: tuple[int, ...]
    first_row: int
    flipped: bool

    def needs(self) -> dict[str, tuple[int, ...]]:
        return {self.name: self.shape}

    def read(self, tensor: ReadTensor, index: Index) -> np.ndarray:
        out, into = index[::-1] if self.flipped else index
        rows = slice(out.start + self.first_row, out.stop + self.first_row)
        found = tensor(self.name, (rows, into))
        return found.T if self.flipped else found


@dataclass(frozen=True, slots=True)
class Columns:
    """A parameter that consists of consecutive columns of one tensor, from `first` on. Padding of
    its rows is read as zeros."""

    name: str
    shape: tuple[int, ...]
    first: int

    def needs(self) -> dict[str, tuple[int, ...]]:
        return {self.name: self.shape}

    def read(self, tensor: ReadTensor, index: Index) -> np.ndarray:
        rows, columns = index
        part = slice(columns.start + self.first, columns.stop + self.first)
        found = tensor(self.name, (rows, part))
        return np.pad(found, ((0, _length(rows) - len(found)), (0, 0)))


@dataclass(frozen=True, slots=True)
class HeadRows:
    """A parameter [N, in, out] taken from one tensor [N x rows per head, in], which has further
    rows in each head. The parameter's part starts at row `first_row` of each head."""

    name: str
    shape: tuple[int, ...]
    head_rows: int
    first_row: int

    def needs(self) -> dict[str, tuple[int, ...]]:
        return {self.name: self.shape}

    def read(self, tensor: ReadTensor, index: Index) -> np.ndarray:
        heads, into, out = index
        rows = slice(heads.start * self.head_rows, heads.stop * self.head_rows)
        found = tensor(self.name, (rows, into))
        found = found.reshape(-1, self.head_rows, found.shape[1])
        mine = found[:, out.start + self.first_row : out.stop + self.first_row]
        return np.swapaxes(mine, 1, 2)


@dataclass(frozen=True, slots=True)
class SomeRows:
    """A parameter that consists of the listed rows of one tensor [rows, ...], in the listed order.
    `flipped` means that the parameter is [in, out]. Only the listed rows are read. Dimensions of
    the tensor beyond the second must have size one."""

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    flipped: bool = False

    def needs(self) -> dict[str, tuple[int, ...]]:
        return {self.name: self.shape}

    def read(self, tensor: ReadTensor, index: Index) -> np.ndarray:
        out, *into = index[::-1] if self.flipped else index
        rows = np.array(self.rows[out])
        ends = np.flatnonzero(np.diff(rows) != 1) + 1
        rest = (slice(0, 1),) * (len(self.shape) - len(index))
        parts = [
            tensor(self.name, (slice(int(run[0]), int(run[-1]) + 1), *rest, *into))
            for run in np.split(rows, ends)
        ]
        found = np.concatenate(parts).reshape(len(rows), *(part.stop - part.start for part in into))
        return found.T if self.flipped else found


@dataclass(frozen=True, slots=True)
class JoinedHeads:
    """A parameter that joins several tensors [heads x rows, ...] head by head: the rows of a head
    in the first tensor, then those in the next. `parts` are (name, shape) of the tensors. `flipped`
    means that the parameter is [in, out]. Dimensions of the tensors beyond the second must have
    size one."""

    parts: tuple[tuple[str, tuple[int, ...]], ...]
    heads: int
    flipped: bool = False

    def needs(self) -> dict[str, tuple[int, ...]]:
        return dict(self.parts)

    def read(self, tensor: ReadTensor, index: Index) -> np.ndarray:
        out, *into = index[::-1] if self.flipped else index
        sizes = [shape[0] // self.heads for _, shape in self.parts]
        first, last = out.start // sum(sizes), -(-out.stop // sum(sizes))
        found = []
        for (name, shape), size in zip(self.parts, sizes, strict=True):
            rest = (slice(0, 1),) * (len(shape) - len(index))
            rows = tensor(name, (slice(first * size, last * size), *rest, *into))
            found.append(rows.reshape(last - first, size, *(_length(part) for part in into)))
        joined = np.concatenate(found, axis=1)
        joined = joined.reshape(-1, *joined.shape[2:])[out.start - first * sum(sizes) :]
        joined = joined[: _length(out)]
        return joined.T if self.flipped else joined


@dataclass(frozen=True, slots=True)
class Fused:
    """A parameter [E, in, out] that is a part of one tensor [E, all out, in]. The part starts at
    row `first_row`. With `inward` the tensor is [E, in, all out]."""

    name: str
    shape: tuple[int, ...]
    first_row: int = 0
    inward: bool = False

    def needs(self) -> dict[str, tuple[int, ...]]:
        return {self.name: self.shape}

    def read(self, tensor: ReadTensor, index: Index) -> np.ndarray:
        experts, into, out = index
        rows = slice(out.start + self.first_row, out.stop + self.first_row)
        if self.inward:
            return tensor(self.name, (experts, into, rows))
        return np.swapaxes(tensor(self.name, (experts, rows, into)), 1, 2)


@dataclass(frozen=True, slots=True)
class EverySecond:
    """A parameter that consists of every second column of a tensor, from column `first` on."""

    name: str
    shape: tuple[int, ...]
    first: int

    def needs(self) -> dict[str, tuple[int, ...]]:
        return {self.name: self.shape}

    def read(self, tensor: ReadTensor, index: Index) -> np.ndarray:
        *rest, columns = index
        first, last = (2 * column + self.first for column in (columns.start, columns.stop))
        return tensor(self.name, (*rest, slice(first, min(last, self.shape[-1]), 2)))


def _length(part: slice) -> int:
    return part.stop - part.start
