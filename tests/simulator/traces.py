"""Writes traces in the project's own columns, for tests that read them."""

import csv
import gzip
import json
from collections.abc import Iterable
from pathlib import Path

from jdisagg.simulator.trace_files import COLUMNS, OPTIONAL
from jdisagg.simulator.workloads import Arrival


def write_trace(arrivals: Iterable[Arrival], path: str | Path) -> None:
    """Writes CSV, or JSONL for a name with .jsonl; gzipped for a name that ends in .gz."""
    path = Path(path)
    fields = (*COLUMNS, *OPTIONAL)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", newline="", encoding="utf-8") as out:
        if ".jsonl" in path.suffixes:
            for item in arrivals:
                out.write(json.dumps({name: getattr(item, name) for name in fields}) + "\n")
            return
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(fields)
        for item in arrivals:
            values = {name: getattr(item, name) for name in fields}
            values["block_hashes"] = " ".join(map(str, item.block_hashes))
            writer.writerow(["" if values[name] is None else values[name] for name in fields])
