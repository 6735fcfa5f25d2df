"""What Prometheus would read of a process."""

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(text: bytes) -> Samples:
    """By name and labels, with Prometheus' own parser."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def at(samples: Samples, name: str, **labels: str) -> float:
    return samples[(f"jdisagg_{name}", frozenset(labels.items()))]


def total(samples: Samples, name: str) -> float:
    """Over all labels."""
    return sum(value for (found, _), value in samples.items() if found == f"jdisagg_{name}")


def get(port: int, path: str = "/metrics") -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        return answer.read()
