"""The files of deploy/ are those that tools/dashboards.py writes, and ask for nothing that no
process exports: every metric and label of a query is looked up in what was scraped of a cluster
that served, or, of counters of rare events, where the code counts them."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jdisagg.errors import UnavailableError
from jdisagg.observe.canary import Canary
from tests.fakes.cluster import toy_request
from tests.fakes.virtual_time import run_virtually
from tests.observe.kept import keeping
from tests.worker.tiers import other
from tools import dashboards

ROOT = Path(__file__).resolve().parents[2]
METRIC = re.compile(r"\b(jdisagg_\w+)(?:\{([^{}]*)\})?")  # and what it is matched by
BY = re.compile(r"by \(([^()]*)\)")
COUNTED = re.compile(r'\.add\(\s*"(\w+)"((?:[^()]|\([^()]*\))*)\)', re.S)
OF_ALL = {"model_name", "le"}


def queries() -> Iterator[str]:
    for panel in dashboards.grafana()["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (alert.expression for alert in dashboards.ALERTS)


def exported() -> dict[str, set[str]]:
    """Labels by the name of each sample."""
    found: dict[str, set[str]] = {}

    async def main() -> None:
        async with keeping() as cluster:
            metrics = cluster.observer.metrics
            metrics.watch_waiting(lambda: 0)
            metrics.watch_canary(Canary(10.0), lambda: 0.0)
            for number in range(3):
                await cluster.collect(toy_request(number))
            for number in (1, 2, 1):
                await cluster.collect(replace(other(number), request_id="again"))
            metrics.measured("ttft", 1.0, 2.0)
            metrics.requests.retries.labels(type(UnavailableError("")).__name__).inc()
            metrics.requests.errors.labels("UNAVAILABLE", "UnavailableError").inc()
            text = (await metrics.scrape()).decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)

    run_virtually(main)
    for path in (ROOT / "jdisagg").rglob("*.py"):
        for name, rest in COUNTED.findall(path.read_text()):
            labels = set(re.findall(r"(\w+)=", rest))
            found.setdefault(f"jdisagg_{name}_total", {"owner"}).update(labels)
    return found


def test_every_metric_and_label_that_is_asked_for_is_exported() -> None:
    known, asked = exported(), set[str]()
    for query in queries():
        metrics = METRIC.findall(query)
        assert metrics, query
        by = {label.strip() for group in BY.findall(query) for label in group.split(",")}
        for name, matchers in metrics:
            assert name in known, f"{name} of {query}"
            labels = {one.split("=")[0] for one in matchers.split(",") if one} | by
            lacking = labels - OF_ALL - known[name]
            assert not lacking, f"{name} has no {lacking}, of {query}"
            asked.add(name)
    assert len(asked) > 30


@pytest.mark.parametrize("name", ["grafana.json", "alerts.yaml"])
def test_the_files_are_those_that_are_written_today(name: str) -> None:
    assert (dashboards.FOLDER / name).read_text() == dashboards.files()[name], (
        "run python -m tools.dashboards"
    )


def test_a_legend_names_labels_that_its_query_keeps_and_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(dashboards.files()["grafana.json"])["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= dashboards.COLUMNS
        taken |= cells
        for target in panel.get("targets", ()):
            kept = {one.strip() for group in BY.findall(target["expr"]) for one in group.split(",")}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept


METRIC_NAME = re.compile(r"\bjdisagg_\w+?(?=_bucket|\{|\[)")


def test_every_panel_says_what_its_metrics_mean() -> None:
    for panel in json.loads(dashboards.files()["grafana.json"])["panels"]:
        asked = {
            name
            for target in panel.get("targets", ())
            for name in METRIC_NAME.findall(target["expr"])
        }
        for name in asked:
            assert re.search(rf"{name}: \w.+\.", panel["description"]), panel["title"]
