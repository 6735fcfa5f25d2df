"""Writes deploy/grafana.json and deploy/alerts.yaml, the dashboard and the alerts of operators,
from the names under which jdisagg/observe exports metrics.

`python -m tools.dashboards`

A query uses counter names with their suffix (_total) and histogram names with _bucket. Queries are
summed over processes. The dashboard variable `$model` selects a model, and `$pool` selects prefill
or decode workers. Alert thresholds that depend on a service's objectives are constants at the top
of this file. Operators change them in their copy."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jdisagg.observe.counter_texts import TEXTS, text_of
from jdisagg.request import FinishReason
from tools.reference import metric_rows

FOLDER = Path(__file__).resolve().parents[1] / "deploy"
COLUMNS, WIDTH, HEIGHT = 24, 8, 7

TTFT_P99_SECONDS = 10
TBT_P99_SECONDS = 1
ERROR_SHARE = 0.05
QUEUE = 100

# Finish reasons that are no errors, and errors of the service, not of the caller.
DONE = "|".join(reason.value for reason in FinishReason)
OURS = "UNAVAILABLE|INTERNAL|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|UNKNOWN"


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph of the dashboard. `queries` are pairs of (legend, PromQL)."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert that fires when the PromQL `expression` has been true for `minutes`."""

    name: str
    expression: str
    minutes: int
    severity: str
    summary: str
    remedy: str


def rate(metric: str, *by: str, where: str = "") -> str:
    """Returns the PromQL query for the rate of a counter, summed by the labels `by`."""
    chosen = f'model_name=~"$model"{"," + where if where else ""}'
    return f"sum{_by(by)}(rate({metric}{{{chosen}}}[$__rate_interval]))"


def gauge(metric: str, *by: str, where: str = "") -> str:
    chosen = f'model_name=~"$model"{"," + where if where else ""}'
    return f"sum{_by(by)}({metric}{{{chosen}}})"


def quantile(part: float, histogram: str, *by: str) -> str:
    return f"histogram_quantile({part}, {rate(f'{histogram}_bucket', 'le', *by)})"


def quantiles(histogram: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"p{part * 100:g}", quantile(part, histogram)) for part in (0.5, 0.9, 0.99))


POOL = 'role=~"$pool"'


def _by(labels: Sequence[str]) -> str:
    return f" by ({', '.join(labels)}) " if labels else ""


ROWS: dict[str, tuple[Panel, ...]] = {
    "Requests": (
        Panel("Time to first token", "s", quantiles("jdisagg_time_to_first_token_seconds")),
        Panel("Time per output token", "s", quantiles("jdisagg_time_per_output_token_seconds")),
        Panel("Gaps between tokens", "s", quantiles("jdisagg_time_between_tokens_seconds")),
        Panel(
            "Requests ended",
            "reqps",
            (("{{result}}", rate("jdisagg_requests_finished_total", "result")),),
        ),
        Panel(
            "Errors",
            "reqps",
            (("{{code}} {{error}}", rate("jdisagg_request_errors_total", "code", "error")),),
        ),
        Panel(
            "Tokens",
            "short",
            (
                ("prompts", rate("jdisagg_prompt_tokens_total")),
                ("answers", rate("jdisagg_generated_tokens_total")),
            ),
        ),
        Panel("Prompt lengths", "short", quantiles("jdisagg_request_prompt_tokens")),
        Panel("Answer lengths", "short", quantiles("jdisagg_request_generation_tokens")),
        Panel("Waits for pages and prefill", "s", quantiles("jdisagg_queue_seconds")),
    ),
    "Router": (
        Panel("Waiting at the router", "short", (("requests", gauge("jdisagg_router_waiting")),)),
        Panel("Placements", "reqps", (("{{reason}}", rate("jdisagg_placements_total", "reason")),)),
        Panel("Refused", "reqps", (("{{cause}}", rate("jdisagg_rejections_total", "cause")),)),
        Panel(
            "Attempts beyond the first",
            "reqps",
            (("{{cause}}", rate("jdisagg_retries_total", "cause")),),
        ),
        Panel(
            "First token, actual over predicted",
            "short",
            quantiles("jdisagg_actual_over_predicted_ratio"),
        ),
        Panel("Ready", "short", (("ready", gauge("jdisagg_ready")),)),
    ),
    "Workers": (
        Panel(
            "Pages",
            "short",
            (("{{worker}} {{state}}", gauge("jdisagg_pages", "worker", "state", where=POOL)),),
        ),
        Panel(
            "Running",
            "short",
            (("{{worker}}", gauge("jdisagg_worker_running", "worker", where=POOL)),),
        ),
        Panel(
            "Waiting",
            "short",
            (("{{worker}}", gauge("jdisagg_worker_waiting", "worker", where=POOL)),),
        ),
        Panel(
            "Commands, p99",
            "s",
            (
                (
                    "{{worker}} {{command}}",
                    quantile(0.99, "jdisagg_step_seconds", "worker", "command"),
                ),
            ),
        ),
        Panel(
            "Preemptions",
            "short",
            (("{{worker}}", rate("jdisagg_worker_preemptions_total", "worker")),),
        ),
        Panel(
            "Programs compiled",
            "short",
            (("{{worker}}", rate("jdisagg_compilations_total", "worker")),),
        ),
    ),
    "Hand-off": (
        Panel(
            "KV received",
            "Bps",
            (
                (
                    "{{source}} to {{destination}}",
                    rate("jdisagg_kv_bytes_total", "source", "destination"),
                ),
            ),
        ),
        Panel("Transfer left after prefill", "s", quantiles("jdisagg_exposed_transfer_seconds")),
        Panel("First to second token", "s", quantiles("jdisagg_handoff_gap_seconds")),
        Panel("Pulls", "short", (("{{result}}", rate("jdisagg_pulls_total", "result")),)),
        Panel("A pull", "s", quantiles("jdisagg_pull_seconds")),
        Panel(
            "Blocks that differ, leases that ran out",
            "short",
            (
                ("checksums", rate("jdisagg_checksums_mismatched_total", "owner")),
                ("leases", rate("jdisagg_leases_expired_total", "owner")),
            ),
        ),
    ),
    "KV that stays": (
        Panel(
            "Share of prompts' tokens that were known",
            "percentunit",
            (
                (
                    "{{owner}}",
                    f"{rate('jdisagg_prefix_hit_tokens_total', 'owner')}"
                    f" / {rate('jdisagg_prefix_asked_tokens_total', 'owner')}",
                ),
            ),
        ),
        Panel(
            "Where known tokens were",
            "short",
            (("{{tier}}", rate("jdisagg_cached_tokens_total", "tier")),),
        ),
        Panel(
            "Room taken",
            "percentunit",
            (
                (
                    "{{worker}} {{tier}}",
                    f"{gauge('jdisagg_kept_bytes', 'worker', 'tier', where=POOL)}"
                    f" / {gauge('jdisagg_kept_room_bytes', 'worker', 'tier', where=POOL)}",
                ),
            ),
        ),
        Panel(
            "Blocks kept",
            "short",
            (("{{worker}} {{tier}}", gauge("jdisagg_kept_blocks", "worker", "tier", where=POOL)),),
        ),
        Panel(
            "KV to and from tiers",
            "Bps",
            (("{{tier}} {{way}}", rate("jdisagg_kept_bytes_moved_total", "tier", "way")),),
        ),
        Panel(
            "A piece to or from a tier, p99",
            "s",
            (("{{tier}} {{way}}", quantile(0.99, "jdisagg_kept_move_seconds", "tier", "way")),),
        ),
        Panel(
            "Blocks given up",
            "short",
            (("{{cause}}", rate("jdisagg_prefix_blocks_evicted_total", "cause")),),
        ),
        Panel(
            "Host memory",
            "short",
            (
                ("written", rate("jdisagg_host_blocks_written_total")),
                ("brought back", rate("jdisagg_host_blocks_restored_total")),
                ("given up, {{cause}}", rate("jdisagg_host_blocks_dropped_total", "cause")),
                ("late", rate("jdisagg_host_restores_late_total")),
            ),
        ),
        Panel(
            "Disk",
            "short",
            (
                ("written", rate("jdisagg_disk_blocks_written_total")),
                ("brought back", rate("jdisagg_disk_blocks_restored_total")),
                ("given up, {{cause}}", rate("jdisagg_disk_blocks_dropped_total", "cause")),
                ("errors, {{cause}}", rate("jdisagg_disk_errors_total", "cause")),
            ),
        ),
        Panel(
            "Other workers",
            "short",
            (
                ("fetched", rate("jdisagg_peer_blocks_fetched_total")),
                ("given", rate("jdisagg_peer_blocks_given_total")),
                ("not fetched, {{cause}}", rate("jdisagg_peer_fetch_failed_total", "cause")),
            ),
        ),
    ),
}

ALERTS = (
    Alert(
        "NotReady",
        "max by (model_name) (jdisagg_ready) == 0",
        1,
        "critical",
        "KV has not made the trip from a prefill to a decode worker lately",
        "see which pair is silent in jdisagg_canary_age_seconds and in the router's log",
    ),
    Alert(
        "WorkerSilent",
        "jdisagg_worker_up == 0",
        1,
        "warning",
        "worker {{ $labels.worker }} does not answer its own process",
        "its log says what its mesh does; the supervisor starts it again when it ends",
    ),
    Alert(
        "Errors",
        f'sum by (model_name) (rate(jdisagg_request_errors_total{{code=~"{OURS}"}}[5m]))'
        f' / (sum by (model_name) (rate(jdisagg_requests_finished_total{{result=~"{DONE}"}}[5m]))'
        f' + sum by (model_name) (rate(jdisagg_request_errors_total{{code=~"{OURS}"}}[5m])))'
        f" > {ERROR_SHARE}",
        5,
        "critical",
        f"more than {ERROR_SHARE:.0%} of requests end with an error of the service",
        "jdisagg_request_errors_total by error says which; RESOURCE_EXHAUSTED is a full queue",
    ),
    Alert(
        "FirstTokenLate",
        "histogram_quantile(0.99, sum by (le, model_name)"
        f" (rate(jdisagg_time_to_first_token_seconds_bucket[5m]))) > {TTFT_P99_SECONDS}",
        10,
        "warning",
        f"one request in a hundred waits more than {TTFT_P99_SECONDS} s for its first token",
        "more prefill workers, or a limit (routing.ttft_slo_seconds) that refuses early",
    ),
    Alert(
        "TokensLate",
        "histogram_quantile(0.99, sum by (le, model_name)"
        f" (rate(jdisagg_time_between_tokens_seconds_bucket[5m]))) > {TBT_P99_SECONDS}",
        10,
        "warning",
        f"one gap between tokens in a hundred is longer than {TBT_P99_SECONDS} s",
        "more decode workers; jdisagg_worker_preemptions_total says whether pages are short",
    ),
    Alert(
        "QueueLong",
        f"sum by (model_name) (jdisagg_router_waiting) > {QUEUE}",
        5,
        "warning",
        f"more than {QUEUE} requests wait at the router",
        "jdisagg_pages by state says whether decode pages or prefill are short",
    ),
    Alert(
        "PagesShort",
        "sum by (worker) (rate(jdisagg_worker_preemptions_total[10m])) > 0.1",
        10,
        "warning",
        "worker {{ $labels.worker }} takes pages from running sequences",
        "more decode workers, fewer slots_per_rank, or a larger growth_tokens",
    ),
    Alert(
        "KvSpoiled",
        "increase(jdisagg_checksums_mismatched_total[10m]) > 0",
        0,
        "critical",
        "KV came to {{ $labels.owner }} that differs from what was computed",
        "it was computed again and cost no token; suspect memory, a network card or a link",
    ),
    Alert(
        "DiskOfKvFails",
        "sum by (owner, cause) (increase(jdisagg_disk_errors_total[10m])) > 0",
        10,
        "warning",
        "files of KV at {{ $labels.owner }} fail: {{ $labels.cause }}",
        "costs time, no token: see the disk of --disk_cache_dir, its room and its rights",
    ),
    Alert(
        "KvComesLate",
        "sum by (owner) (rate(jdisagg_host_restores_late_total[10m])) > 0.1",
        10,
        "warning",
        "prompts at {{ $labels.owner }} stop waiting for KV from host memory or disk",
        "jdisagg_kept_move_seconds by tier says which is slow; what is dear is asked for less",
    ),
    Alert(
        "CompilesWhileItServes",
        "sum by (worker) (increase(jdisagg_compilations_total[30m])) > 0",
        30,
        "warning",
        "worker {{ $labels.worker }} compiles programs while it serves",
        "a shape was not warmed up: report it with the worker's log",
    ),
    Alert(
        "SilentWorkersHoldKv",
        "sum by (owner) (increase(jdisagg_leases_expired_total[10m])) > 10",
        5,
        "warning",
        "{{ $labels.owner }} gives up leases of peers that went silent",
        "look for workers that restart, and at the network between them",
    ),
)


def _meanings() -> dict[str, str]:
    """Returns the meaning of each metric, as its HELP text states it."""
    found = {name.strip("`"): meaning for name, _, _, meaning in metric_rows()}
    for texts in TEXTS.values():
        found |= {f"jdisagg_{counter}_total": meaning for counter, meaning in texts.items()}
    found["jdisagg_handoffs_total"] = text_of("handoffs_completed")
    found["jdisagg_pull_failures_total"] = text_of("pulls_failed")
    return found


def _description(panel: Panel, meanings: Mapping[str, str]) -> str:
    names = dict.fromkeys(
        re.sub(r"_(bucket|sum|count)$", "", name)
        for _, query in panel.queries
        for name in re.findall(r"\bjdisagg_\w+", query)
    )
    return "\n".join(f"{name}: {meanings[name]}" for name in names)


def grafana() -> dict[str, Any]:
    """Returns the dashboard as the JSON object that Grafana imports."""
    panels: list[dict[str, Any]] = []
    meanings = _meanings()
    top = 0
    for row, members in ROWS.items():
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        panels.append({"type": "row", "title": row, "gridPos": place, "panels": []})
        top += 1
        for number, panel in enumerate(members):
            down, across = divmod(number, COLUMNS // WIDTH)
            made = _graph(panel, across * WIDTH, top + down * HEIGHT)
            panels.append({**made, "description": _description(panel, meanings)})
        top += -(-len(members) // (COLUMNS // WIDTH)) * HEIGHT
    for number, panel in enumerate(panels):
        panel["id"] = number + 1
    return {
        "title": "jdisagg",
        "uid": "jdisagg",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "source",
                    "type": "datasource",
                    "query": "prometheus",
                    "label": "Prometheus",
                },
                _choice("model", "label_values(jdisagg_build_info, model_name)"),
                _choice("pool", "label_values(jdisagg_worker_running, role)"),
            ]
        },
        "panels": panels,
    }


def _choice(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _graph(panel: Panel, x: int, y: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "expr": query,
                "legendFormat": legend,
                "datasource": source,
            }
            for at, (legend, query) in enumerate(panel.queries)
        ],
    }


def alerts() -> dict[str, Any]:
    """Returns the alert rules in the structure of a Prometheus rules file."""
    rules = [
        {
            "alert": f"Jdisagg{alert.name}",
            "expr": alert.expression,
            "for": f"{alert.minutes}m",
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "remedy": alert.remedy},
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": "jdisagg", "rules": rules}]}


def yaml(value: Any, indent: int = 0) -> str:
    """Formats mappings, and lists of mappings, as YAML in block style. Scalars are written as JSON,
    which is valid YAML."""
    pad = "  " * indent
    if isinstance(value, dict):
        lines = []
        for key, inner in value.items():
            nested = isinstance(inner, dict | list)
            text = f"\n{yaml(inner, indent + 1)}" if nested else f" {json.dumps(inner)}\n"
            lines.append(f"{pad}{key}:{text}")
        return "".join(lines)
    items = [yaml(item, indent + 1) for item in value]
    return "".join(f"{pad}- {item[len(pad) + 2 :]}" for item in items)


def files() -> dict[str, str]:
    """Returns the texts of the generated files, by file name."""
    return {
        "grafana.json": json.dumps(grafana(), indent=1) + "\n",
        "alerts.yaml": "# Written by `python -m tools.dashboards`.\n" + yaml(alerts()),
    }


def main() -> None:
    for name, text in files().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
