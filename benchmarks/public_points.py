"""Reads published measurements of other engines in the form of queries to the cost model
(benchmarks/data/README.md): a closed loop of a number of users on one deployment, its mean TTFT and
TPOT.

    python -m benchmarks.public_points --source=silicon_sample.csv     # writes the data file again

A point that the cost model cannot represent has a reason (`refusal`), by which coverage is counted.
Points that a source contains twice are used once. If two copies of one measurement state different
deployments and one of them is wrong, the other is used (`_devices_counted_once`). Points are
divided into two halves by series (all points of one deployment, prompt length and output length),
so that points of neighbouring concurrency are in the same half. Only one half is used to develop
the mechanisms."""

import csv
import gzip
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from absl import app, flags

from jdisagg.costs.catalog import CATALOG
from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.hardware import HARDWARE
from jdisagg.errors import JdisaggError
from jdisagg.layout.axes import Layout

_SOURCE = flags.DEFINE_string("source", "", "silicon_sample.csv of aiconfigurator.")

DATA = Path(__file__).resolve().parent / "data" / "silicon_points.csv.gz"

# Names of the source, and ours. DeepSeek-R1 and V3.1 have the sizes of V3.
MODELS = {
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-v3",
    "nvidia/DeepSeek-V3.1-NVFP4": "deepseek-v3",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "nvidia/Qwen3-32B-NVFP4": "qwen3-32b",
    "Qwen/Qwen3.5-397B-A17B": "qwen3.5-397b-a17b",
    "MiniMaxAI/MiniMax-M2.5": "minimax-m2.5",
    "moonshotai/Kimi-K2.5": "kimi-k2.5",
    "zhipuai/GLM-5": "glm-5",
}
CARDS = {
    "h100_sxm": "h100",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
    "gb200": "gb200-nvl72",
    "b300_sxm": "b300",
    "gb300": "gb300-nvl72",
}
_Doubt = tuple[bool, bool, str]  # what it lacks, whether it was put right, where it stands
# What the source's layouts are called, in its columns.
_PARTS = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
_LAYOUTS = ("tp", "dp", "moe_tp", "moe_ep")
COLUMNS = (
    "origin", "engine", "version", "model", "card", "precision", "mode", "prompt", "output",
    "users", "batch", "workers", *_LAYOUTS,
    "prefill_batch", "prefill_workers", *(f"prefill_{name}" for name in _LAYOUTS),
    "ttft_ms", "tpot_ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Devices:
    """A layout as the source states it; 0 for sizes that it does not state."""

    tp: int
    dp: int
    moe_tp: int
    moe_ep: int

    def layout(self, *, experts: bool) -> Layout | str:
        """Returns our layout, or the reason why there is none. If experts are sharded over several
        devices of several groups, returns our layout of one group, which has the same bytes and
        operations per device."""
        dp = max(1, self.dp)
        devices = dp * self.tp
        if not experts:
            return Layout(dp, self.tp) if dp == 1 else "data parallelism of a dense model"
        spread = max(1, self.moe_tp) * max(1, self.moe_ep)
        if spread not in (1, devices):
            return "its layout contradicts itself"
        if spread == 1 or (self.moe_ep <= 1 and dp == 1):
            return Layout(dp, self.tp) if dp == 1 or spread == devices else "experts not stated"
        return Layout(dp, self.tp, devices)


@dataclass(frozen=True, slots=True)
class Point:
    """One measured closed loop. `users`: number of concurrent requests. `batch`: number of
    sequences of one dp rank, 0 if the source does not state it. Seconds are means over the
    requests; TTFT is from sending to the first token. `prefill` is set if prefill has separate
    instances."""

    number: int
    origin: str
    engine: str
    version: str
    model: str
    card: str
    precision: str
    mode: Literal["agg", "disagg"]
    prompt: int
    output: int
    users: int
    batch: int
    workers: int
    devices: Devices
    prefill_workers: int
    prefill: Devices
    ttft: float
    tpot: float

    @property
    def series(self) -> str:
        """Returns the key of all points with the same deployment, prompt and output, which differ
        only in concurrency."""
        layouts = (self.devices, self.prefill, self.workers, self.prefill_workers)
        said = (self.engine, self.model, self.card, self.precision, self.prompt, self.output)
        return repr((*said, *layouts))

    @property
    def looked_at(self) -> bool:
        """Returns whether the point is in the half with which mechanisms were adjusted; the other
        half is held out."""
        return zlib.crc32(self.series.encode()) % 2 == 0

    @property
    def layout(self) -> Layout | str:
        return self.devices.layout(experts=bool(CATALOG[self.model].experts))

    @property
    def refusal(self) -> str:
        """Returns the reason why the model cannot predict the point; "" if it can."""
        if self.model not in CATALOG:
            return f"model not in the catalogue: {self.model}"
        if self.card not in HARDWARE:
            return f"hardware not in the table: {self.card}"
        if self.mode == "disagg" and not (self.workers and self.prefill_workers):
            return "its source does not say how many instances there are"
        if self.devices.tp > 16 and self.mode == "agg":
            return "its source writes a deployment of many instances as one"
        found = [self.layout]
        if self.mode == "disagg":
            found.append(self.prefill.layout(experts=bool(CATALOG[self.model].experts)))
        for layout in found:
            if isinstance(layout, str):
                return layout
            try:
                CostModel(CATALOG[self.model], HARDWARE[self.card], layout)
            except JdisaggError as error:
                return f"layout does not divide the model: {error.message}"
        return ""


def public_points(path: Path = DATA) -> tuple[Point, ...]:
    """Returns all points of the data file, in order."""
    with gzip.open(path, "rt", newline="") as lines:
        return tuple(_point(number, row) for number, row in enumerate(csv.DictReader(lines)))


def _point(number: int, row: Mapping[str, str]) -> Point:
    def devices(prefix: str) -> Devices:
        return Devices(*(int(row[prefix + name] or 0) for name in _LAYOUTS))

    if row["mode"] not in ("agg", "disagg"):
        raise ValueError(f"point {number}: mode {row['mode']!r}; it is agg or disagg")
    return Point(
        number=number,
        origin=row["origin"],
        engine=row["engine"],
        version=row["version"],
        model=row["model"],
        card=row["card"],
        precision=row["precision"],
        mode="agg" if row["mode"] == "agg" else "disagg",
        prompt=int(row["prompt"]),
        output=int(row["output"]),
        users=int(row["users"]),
        batch=int(row["batch"] or 0),
        workers=int(row["workers"] or 0),
        devices=devices(""),
        prefill_workers=int(row["prefill_workers"] or 0),
        prefill=devices("prefill_"),
        ttft=float(row["ttft_ms"]) / 1e3,
        tpot=float(row["tpot_ms"]) / 1e3,
    )


# ---- from the source


def condensed(rows: Iterable[Mapping[str, str]]) -> list[dict[str, object]]:
    """Returns each measurement of silicon_sample.csv once, with our columns."""
    same: defaultdict[tuple[str, ...], list[tuple[_Doubt, dict[str, object]]]] = defaultdict(list)
    for row in rows:
        key = ("system", "backend", "isl", "osl", "silicon_ttft_ms", "silicon_tpot_ms")
        same[tuple(row[name] for name in key)].append(_read(row))
    # Of copies the one that says most, and that needed no correction.
    best = [min(copies, key=lambda copy: copy[0])[1] for copies in same.values()]
    return sorted(best, key=lambda row: tuple(str(row[name]).zfill(8) for name in COLUMNS))


def _read(row: Mapping[str, str]) -> tuple[_Doubt, dict[str, object]]:
    said = row["silicon_data_source"]
    users = re.search(r"silicon_concurrency=(\d+)", said)
    disagg = row["mode"] == "disagg"
    prefix = "decode_" if disagg else ""
    counts = [int(row[prefix + name] or 0) for name in _PARTS]
    batch = int(row[prefix + "batch_size"] or 0)
    known = int(users[1]) if users else batch * max(1, counts[1])
    single = _devices_counted_once(*counts)
    if single != tuple(counts):
        batch = known // max(1, single[1])
    name = row["model_path"]
    marked = "fp4" if name.endswith("NVFP4") else "fp8" if name.endswith("FP8") else "bf16"
    found: dict[str, object] = {
        "origin": "gap" if "gap-analysis" in said else "inferencex",
        "engine": row["backend"],
        "version": row["backend_version"],
        "model": MODELS[name],
        "card": CARDS[row["system"]],
        "precision": row["precision"] or marked,
        "mode": row["mode"],
        "prompt": row["isl"],
        "output": row["osl"],
        "users": known,
        "batch": batch,
        "workers": row["decode_num_workers"] if disagg else 1,
        "prefill_batch": row["prefill_batch_size"],
        "prefill_workers": row["prefill_num_workers"],
        "ttft_ms": f"{float(row['silicon_ttft_ms']):.5g}",
        "tpot_ms": f"{float(row['silicon_tpot_ms']):.5g}",
    }
    for ours, count in zip(_LAYOUTS, single, strict=True):
        found[ours] = count or ""
    for ours, theirs in zip(_LAYOUTS, _PARTS, strict=True):
        found[f"prefill_{ours}"] = row[f"prefill_{theirs}"]
    return (disagg and not row["decode_num_workers"], single != tuple(counts), said), found


def _devices_counted_once(tp: int, dp: int, moe_tp: int, moe_ep: int) -> tuple[int, int, int, int]:
    """Corrects points in which n devices are stated as n x n: 66 measurements are in the source
    twice, once with tp (or dp) n^2 and experts n x n, and once with n devices and experts 1 x n."""
    if moe_tp == moe_ep > 1 and moe_tp * moe_ep == tp * max(1, dp) and 1 in (tp, max(1, dp)):
        return (tp, dp // moe_tp, 1, moe_ep) if dp > 1 else (tp // moe_tp, dp, 1, moe_ep)
    if tp == dp > 1 and (moe_tp, moe_ep) == (1, tp * dp):
        return 1, dp, 1, dp
    return tp, dp, moe_tp, moe_ep


def main(argv: list[str]) -> None:
    del argv
    if not _SOURCE.value:
        raise app.UsageError("--source must name silicon_sample.csv of aiconfigurator")
    with open(_SOURCE.value, newline="") as lines:
        kept = condensed(csv.DictReader(lines))
    with gzip.GzipFile(DATA, "wb", mtime=0) as packed:
        text = [",".join(COLUMNS)] + [",".join(str(row[key]) for key in COLUMNS) for row in kept]
        packed.write(("\n".join(text) + "\n").encode())
    print(f"{len(kept)} measurements, {DATA.stat().st_size} bytes, in {DATA}")


if __name__ == "__main__":
    app.run(main)
