"""Writes a run's requests as CSV or parquet, and its figures as aligned text.

Column names include units. Parquet files need pyarrow (`pip install jdisagg[parquet]`), which is
not imported for CSV."""

import csv
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from jdisagg.errors import ConfigError
from jdisagg.layout.kv_spec import KEPT_NAMES
from jdisagg.simulator.fleet import Fleet
from jdisagg.simulator.report import Percentiles, Report, RequestOutcome, SloLimits

COLUMNS = (
    "request_id", "tenant", "arrival_seconds", "first_token_seconds", "finish_seconds",
    "prompt_tokens", "output_tokens", "ttft_seconds", "tpot_seconds", "handoff_gap_seconds",
    "longest_gap_seconds", "slowest_tenth_seconds", "end", "attained", "prefill", "decode",
    "reason", "queue_seconds", "cached_tokens",
)  # fmt: skip


def row_of(
    item: RequestOutcome, slo: SloLimits | None = None
) -> tuple[str | int | float | bool | None, ...]:
    gaps = item.gaps
    return (
        item.request_id, item.tenant, item.arrival, item.first_token, item.finish,
        item.prompt_tokens, item.output_tokens, item.ttft, item.tpot,
        gaps.first if gaps else None, gaps.longest if gaps else None,
        gaps.slowest_tenth if gaps else None, item.end, slo.attained(item) if slo else None,
        item.prefill, item.decode, item.reason, item.queue_seconds, item.cached_tokens,
    )  # fmt: skip


def write_outcomes(
    outcomes: Sequence[RequestOutcome], path: str | Path, slo: SloLimits | None = None
) -> None:
    """Raises ConfigError like `check_table`."""
    path = Path(path)
    check_table(path)
    if path.suffix == ".parquet":
        return _write_parquet(outcomes, path, slo)
    with open(path, "w", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([_cell(value) for value in row_of(item, slo)] for item in outcomes)


def check_table(path: Path) -> None:
    """Checks, before a simulation runs, that its table of requests can be written.

    Raises:
      ConfigError: The suffix is unknown, the folder does not exist, or pyarrow is missing.
    """
    if path.suffix not in (".csv", ".parquet"):
        raise ConfigError(
            f"{path}: the table of requests must be a .csv or .parquet file; change the name"
        )
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"{path}: the folder does not exist; create it, or choose another")
    if path.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ConfigError(
            f"{path}: parquet needs pyarrow, which is not installed; pip install 'jdisagg[parquet]'"
            " or write .csv"
        )


def reuse_text(counters: Mapping[str, int]) -> str:
    def part(prefix: str) -> str:
        asked = counters.get(f"{prefix}prefix_asked_tokens", 0)
        known = counters.get(f"{prefix}prefix_hit_tokens", 0)
        return f"{known / asked:.1%} of {asked} tokens" if asked else "no lookups"

    said = f"prefix cache: not computed {part('')}"
    if "decode_prefix_asked_tokens" in counters:
        said += f"; not transferred {part('decode_')}"
    if restored := counters.get("host_tokens_restored", 0):
        said += f"; {restored} tokens restored from host memory"
    return said


def fleet_text(fleet: Fleet) -> str:
    pools = {
        "prefill": fleet.prefill,
        "decode" if fleet.prefill else "prefill and decode": fleet.decode,
    }
    told = [
        f"{role} {pool.count} x {pool.hardware.name} ({pool.instance.layout})"
        for role, pool in pools.items()
        if pool is not None
    ]
    kept = KEPT_NAMES.get(fleet.kept_dtype)
    types = fleet.dtype + (f" (KV in {kept})" if kept else "")
    return f"{fleet.geometry.name} {types}, {fleet.mode.value}: {'; '.join(told)}"


def text_of(report: Report) -> str:
    lines = [
        (
            f"{report.requests} requests"
            f" ({', '.join(f'{count} {end}' for end, count in sorted(report.ends.items()))}),"
            f" {report.arrivals_per_second:.3g} a second over {report.duration_seconds:.4g} s;"
            f" {report.output_tokens_per_second:.4g} output and"
            f" {report.prompt_tokens_per_second:.4g} prompt tokens per second"
        ),
        f"{'milliseconds':22}"
        + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p95", "p99", "longest")),
    ]
    for name, values in (
        ("TTFT", report.ttft),
        ("TPOT", report.tpot),
        ("TBT", report.tbt),
        ("slowest tenth of TBT", report.slowest_tenth),
        ("hand-off gap", report.handoff_gap),
        ("latency", report.latency),
    ):
        lines.append(
            f"{name:22}" + "".join(f"{_milliseconds(value):>10}" for value in _cells(values))
        )
    if report.attainment is not None and report.goodput_per_second is not None:
        each = (
            ""
            if report.goodput_per_accelerator is None
            else f", {report.goodput_per_accelerator:.4g} per accelerator"
        )
        lines.append(
            f"SLO attainment {100 * report.attainment:.1f} %, goodput"
            f" {report.goodput_per_second:.4g} requests per second{each}"
        )
    if len(report.tenants) > 1:
        lines.append(
            "attainment by tenant: "
            + ", ".join(f"{name or '-'} {100 * met:.1f} %" for name, met in report.tenants.items())
        )
    if report.utilisation:
        lines.append(
            "utilisation: "
            + ", ".join(f"{role} {100 * part:.1f} %" for role, part in report.utilisation.items())
        )
    if report.dollars_per_million_output_tokens is not None:
        both = f"{report.dollars_per_million_tokens:.4g} counting prompts"
        lines.append(
            f"dollars a million output tokens: {report.dollars_per_million_output_tokens:.4g}"
            f" ({both})"
        )
    return "\n".join(lines)


def _write_parquet(outcomes: Sequence[RequestOutcome], path: Path, slo: SloLimits | None) -> None:
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    rows = [row_of(item, slo) for item in outcomes]
    parquet.write_table(
        arrow.table({name: [row[index] for row in rows] for index, name in enumerate(COLUMNS)}),
        path,
    )


def _cell(value: str | int | float | bool | None) -> str | int:
    if value is None:
        return ""
    if isinstance(value, bool):
        return int(value)
    return f"{value:.9g}" if isinstance(value, float) else value


def _cells(values: Percentiles) -> tuple[float | None, ...]:
    return values.mean, values.p50, values.p90, values.p95, values.p99, values.longest


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{1e3 * value:.5g}"
