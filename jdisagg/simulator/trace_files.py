"""Reads traces of Azure, Mooncake, Splitwise, DistServe and vLLM, and this project's format, as CSV
or JSONL, plain or gzipped.

`read_trace` recognises a trace by its column names (`COLUMNS`), so that no flag needs to name the
format. This project's format has columns at_seconds, prompt_tokens, output_tokens, and optionally
tenant, priority, deadline, block_hashes (space separated in CSV, a list in JSONL). Rows are sorted
by time, and times start at 0. Errors in rows name file, row and column."""

import csv
import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO, cast

from jdisagg.errors import WorkloadError
from jdisagg.simulator.workloads import Arrival

# Accepted names of each column; the first match wins.
COLUMNS: dict[str, tuple[str, ...]] = {
    "at_seconds": (
        "at_seconds",
        "arrival_seconds",
        "arrival_s",
        "arrival_timestamp",
        "TIMESTAMP",
        "timestamp",
    ),
    "prompt_tokens": (
        "prompt_tokens",
        "prompt_len",
        "prompt_size",
        "input_length",
        "input_toks",
        "ContextTokens",
    ),
    "output_tokens": (
        "output_tokens",
        "output_len",
        "token_size",
        "output_length",
        "output_toks",
        "GeneratedTokens",
    ),
}
OPTIONAL: dict[str, tuple[str, ...]] = {
    "tenant": ("tenant",),
    "priority": ("priority",),
    "deadline": ("deadline",),
    "block_hashes": ("block_hashes", "hash_ids"),
}
UNITS_IN_SECOND = {"timestamp": 1000.0}  # Mooncake counts milliseconds

MOST = 10**18  # cap on tokens and priorities; larger sums overflow NumPy's integers

Row = Mapping[str, object]


def read_trace(path: str | Path, limit: int | None = None) -> list[Arrival]:
    """Reads a trace from a .csv or .jsonl file, plain or gzipped. Returns its first `limit`
    requests in order of time, or all requests if `limit` is None.

    Raises:
      WorkloadError: The file is missing, unreadable, empty or has unknown columns; a value is not a
        number or out of range; `limit` is below 1.
    """
    if limit is not None and limit < 1:
        raise WorkloadError(
            f"the first {limit} requests of {path}: must be at least 1; leave the limit out for all"
            " of them"
        )
    path = Path(path)
    rows = _rows(path)
    needed: dict[str, str] = {}
    found: list[Arrival] = []
    for number, row in rows:
        needed = needed or _needed(row, path)
        found.append(_arrival(row, needed | _optional(row), f"{path.name}, row {number}"))
    if not found:
        raise WorkloadError(f"{path} holds no requests; give a trace with at least one row")
    found.sort(key=lambda item: item.at_seconds)
    first = found[0].at_seconds
    return [replace(item, at_seconds=item.at_seconds - first) for item in found[:limit]]


def _opened(path: Path) -> TextIO:
    # Accepts a byte order mark, which other programs may write, and ignores the machine's locale.
    opened = gzip.open if path.suffix == ".gz" else open
    return cast(TextIO, opened(path, "rt", newline="", encoding="utf-8-sig"))


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    kinds = [suffix for suffix in path.suffixes if suffix in (".csv", ".jsonl")]
    if not kinds:
        raise WorkloadError(
            f"{path}: a trace must be a .csv or .jsonl file (.gz or not); rename or convert it"
        )
    try:
        with _opened(path) as lines:
            if kinds[-1] == ".csv":
                yield from enumerate(csv.DictReader(lines), 2)
            else:
                yield from (
                    (number, _parsed(line, path, number))
                    for number, line in enumerate(lines, 1)
                    if line.strip()
                )
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise WorkloadError(f"{path} cannot be read: {error}; give a readable trace") from error


def _parsed(line: str, path: Path, number: int) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        # Deep nesting raises RecursionError; huge integers raise ValueError.
        raise WorkloadError(
            f"{path.name}, row {number}: invalid JSON: {error}; correct or drop the row"
        ) from error
    if not isinstance(row, dict):
        raise WorkloadError(
            f"{path.name}, row {number}: a row must be an object, got {line.strip()[:40]!r};"
            " correct or drop the row"
        )
    return row


def _needed(row: Row, path: Path) -> dict[str, str]:
    names = {}
    for field, known in COLUMNS.items():
        column = next((name for name in known if name in row), None)
        if column is None:
            there = ", ".join(str(name) for name in row) or "none"
            raise WorkloadError(
                f"{path}: no column for {field}; one of {', '.join(known)} is needed, the file has"
                f" {there}"
            )
        names[field] = column
    return names


def _optional(row: Row) -> dict[str, str]:
    return {field: name for field, known in OPTIONAL.items() for name in known[::-1] if name in row}


def _arrival(row: Row, names: Mapping[str, str], where: str) -> Arrival:
    def cell(field: str) -> object:
        return row.get(names[field]) if field in names else None

    at = _time(cell("at_seconds"), f"{where}, {names['at_seconds']}") / UNITS_IN_SECOND.get(
        names["at_seconds"], 1.0
    )
    prompt, output = (
        _count(cell(field), f"{where}, {names[field]}", 1)
        for field in ("prompt_tokens", "output_tokens")
    )
    tenant, priority, deadline = cell("tenant"), cell("priority"), cell("deadline")
    hashes = cell("block_hashes") or ()
    if isinstance(hashes, str):
        hashes = hashes.split()
    if not isinstance(hashes, Sequence):
        raise WorkloadError(
            f"{where}, {names['block_hashes']}: must be a list of integers, got {_short(hashes)};"
            " correct or drop the row"
        )
    blocks = tuple(_block(item, f"{where}, {names['block_hashes']}") for item in hashes)
    rank = 0 if priority in (None, "") else _count(priority, f"{where}, priority", None)
    limit = None if deadline in (None, "") else _number(deadline, f"{where}, deadline")
    try:
        return Arrival(
            at, prompt, output, blocks, "" if tenant is None else str(tenant), rank, limit
        )
    except WorkloadError as error:
        raise WorkloadError(f"{where}: {error.message}") from error


def _time(value: object, where: str) -> float:
    if isinstance(value, str) and "-" in value[1:] and ":" in value:
        with suppress(ValueError, OverflowError):
            moment = datetime.fromisoformat(value.strip())
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return _number(value, where)


def _number(value: object, where: str) -> float:
    number = math.nan
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise WorkloadError(
            f"{where}: must be a number of 0 or more, got {_short(value)}; correct or drop the row"
        )
    return number


def _count(value: object, where: str, least: int | None) -> int:
    count = _integer(value)
    if count is None or abs(count) > MOST or (least is not None and count < least):
        rule = "an integer" if least is None else f"an integer of at least {least}"
        raise WorkloadError(
            f"{where}: must be {rule} and at most {MOST:.0e}, got {_short(value)}; correct or drop"
            " the row"
        )
    return count


def _block(value: object, where: str) -> int:
    name = _integer(value)
    if name is None or name < 0:
        raise WorkloadError(
            f"{where}: must be integers of at least 0, got {_short(value)}; correct or drop the row"
        )
    return name


def _integer(value: object) -> int | None:
    if isinstance(value, str | int) and not isinstance(value, bool):
        with suppress(ValueError):
            return int(value)
    return None


def _short(value: object) -> str:
    said = repr(value)
    return said if len(said) <= 60 else f"{said[:60]}..."
