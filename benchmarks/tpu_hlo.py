"""Counts loops, copies and memory traffic in the text of a program that XLA optimised for a TPU."""

import math
import re
from dataclasses import dataclass

_LINE = re.compile(r"\s*(?:ROOT )?(%[\w.-]+) = (.+?) ([\w-]+)\((.*)")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_COLLECTIVE = re.compile(r"all-|reduce-scatter|ragged-all|collective")
_WITHOUT_TRAFFIC = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "constant",
    "copy-done", "slice-done", "optimization-barrier", "call", "call-start", "call-update",
    "call-done", "async-start", "async-update", "async-done",
}  # fmt: skip
_READS_ROWS = {"gather", "dynamic-slice", "slice"}
_WRITES_ROWS = {"scatter": 2, "dynamic-update-slice": 1}  # the operand with the rows


@dataclass(frozen=True, slots=True)
class _Array:
    bytes: int
    in_vmem: bool
    kind: str
    sizes: str


@dataclass(frozen=True, slots=True)
class _Operation:
    name: str
    kind: str
    results: tuple[_Array, ...]
    operands: tuple[str, ...]
    calls: str  # the computation of a fusion
    parameter: int  # -1 if it is no parameter
    root: bool


def count_operations(hlo: str) -> dict[str, int]:
    """Returns the counts of `TpuCounted` that the text of a program gives. Copies inside of fusions
    write no memory and are not counted. Operations of a loop's body count once."""
    computations = _computations(hlo)
    operations = [
        operation
        for name, computation in computations.items()
        if "fused" not in name
        for operation in computation
    ]
    copied, prefetched = [], 0
    for operation in operations:
        if operation.kind in ("copy", "copy-start", "transpose"):
            result = operation.results[0]
            if result.in_vmem:
                prefetched = max(prefetched, result.bytes)
            else:
                copied.append(result.bytes)
    exchanges = (
        operation
        for operation in operations
        if _COLLECTIVE.match(operation.kind) and not operation.kind.endswith("-done")
    )
    results = {operation.name: operation.results for operation in operations}
    return {
        "whiles": sum(operation.kind == "while" for operation in operations),
        "collectives": sum(1 for _ in exchanges),
        "copies": len(copied),
        "copies_bytes": sum(copied),
        "copied_bytes": max(copied, default=0),
        "prefetched_bytes": prefetched,
        "memory_bytes": sum(
            _memory_bytes(operation, results, computations)
            for operation in operations
            if operation.kind not in _WITHOUT_TRAFFIC
        ),
    }


def _computations(hlo: str) -> dict[str, list[_Operation]]:
    found: dict[str, list[_Operation]] = {}
    for text in hlo.split("\n\n"):
        if not (head := re.match(r"\s*(?:ENTRY )?(%[\w.-]+) \(", text)):
            continue
        operations = found[head[1]] = []
        for line in text.splitlines():
            if match := _LINE.match(line):
                name, results, kind, rest = match.groups()
                calls = re.search(r"calls=(%[\w.-]+)", rest)
                operations.append(
                    _Operation(
                        name,
                        kind,
                        tuple(_array(*part) for part in _ARRAY.findall(results)),
                        tuple(re.findall(r"%[\w.-]+", rest.split("), ")[0])),
                        calls[1] if calls else "",
                        int(rest.split(")")[0]) if kind == "parameter" else -1,
                        line.lstrip().startswith("ROOT"),
                    )
                )
    return found


def _memory_bytes(
    operation: _Operation,
    results: dict[str, tuple[_Array, ...]],
    computations: dict[str, list[_Operation]],
) -> int:
    """Returns the bytes that an operation reads from and writes to HBM. Arrays in VMEM do not
    count. Of the operand of a gather or a slice the rows read count, and of an array that is
    updated in place the rows written."""
    if operation.kind in ("copy-start", "slice-start"):
        # The results are an alias of the source, the copy, and a context of 4 bytes.
        arrays = [part for part in operation.results if part.bytes > 4]
        moved = min(arrays, key=lambda part: part.bytes)
        return moved.bytes * (1 if moved.in_vmem else 2)
    inside = computations.get(operation.calls, [])
    total = 0
    for index, name in enumerate(operation.operands):
        array = next(iter(results.get(name, ())), None)
        if array is not None and not array.in_vmem:
            if inside:
                total += _read_inside(inside, index, array, computations)
            elif operation.kind in _READS_ROWS and index == 0:
                total += sum(part.bytes for part in operation.results)
            elif operation.kind not in _WRITES_ROWS or index > 0:
                total += array.bytes
    written = [part for part in operation.results if not part.in_vmem]
    rows = _rows_written(inside or [operation], results)
    return total + (sum(rows) if rows else sum(part.bytes for part in written))


def _read_inside(
    inside: list[_Operation], index: int, array: _Array, computations: dict[str, list[_Operation]]
) -> int:
    names = {operation.name for operation in inside if operation.parameter == index}
    read = 0
    for operation in inside:
        if not names.intersection(operation.operands):
            continue
        first = operation.operands[0] in names
        if operation.kind == "bitcast":
            names.add(operation.name)
        elif operation.kind in _READS_ROWS and first:
            read += sum(part.bytes for part in operation.results)
        elif operation.kind == "fusion":
            deeper = computations.get(operation.calls, [])
            within = sum(
                _read_inside(deeper, place, array, computations)
                for place, name in enumerate(operation.operands)
                if name in names
            )
            read += within
            if not within:  # it only passes the operand on
                names.add(operation.name)
        elif not (operation.kind in _WRITES_ROWS and first):
            return array.bytes
    return min(read, array.bytes)


def _rows_written(
    operations: list[_Operation], outside: dict[str, tuple[_Array, ...]]
) -> list[int]:
    """Returns the bytes of the rows by which a fusion, or one operation, updates arrays in place.
    Empty if it writes whole arrays."""
    shapes = {**outside, **{operation.name: operation.results for operation in operations}}
    updates = [operation for operation in operations if operation.kind in _WRITES_ROWS]
    names = {operation.name for operation in updates}
    for operation in operations:
        if operation.kind == "bitcast" and names.intersection(operation.operands):
            names.add(operation.name)
    if not any(
        operation.root or len(operations) == 1
        for operation in operations
        if operation.name in names
    ):
        return []
    return [
        shapes[operation.operands[_WRITES_ROWS[operation.kind]]][0].bytes
        for operation in updates
        if len(operation.operands) > _WRITES_ROWS[operation.kind]
        and operation.operands[_WRITES_ROWS[operation.kind]] in shapes
    ]


def _array(kind: str, sizes: str, layout: str) -> _Array:
    return _Array(array_bytes(kind, sizes), "S(1)" in layout, kind, sizes)


def array_bytes(kind: str, sizes: str) -> int:
    """Returns the bytes of an array of XLA's type `kind`, such as "bf16", without padding."""
    bits = re.search(r"\d+", kind)
    count = math.prod(int(size) for size in sizes.split(",") if size)
    return count * (int(bits[0]) if bits else 8) // 8
