"""The elastic controller's advice as metrics, for an external autoscaler that reads Prometheus."""

from collections.abc import Callable, Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from jdisagg.dispatch.roles import AdviceReport


class AdviceGauges(Collector):
    def __init__(self, advice: Callable[[], AdviceReport]) -> None:
        self._advice = advice

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        advice = self._advice()
        by_role = {
            "jdisagg_advised_workers": ("Workers of a role that there should be.", advice.prefill, advice.decode),
            "jdisagg_taking_workers": ("Workers of a role that take new requests.", advice.prefill_now, advice.decode_now),
            "jdisagg_needed_workers": ("The controller's estimate of what the load needs.", advice.prefill_need, advice.decode_need),
        }
        for name, (text, prefill, decode) in by_role.items():
            family = GaugeMetricFamily(name, text, labels=["role"])
            family.add_metric(["prefill"], prefill)
            family.add_metric(["decode"], decode)
            yield family
        attained = GaugeMetricFamily(
            "jdisagg_slo_attainment", "Share of the window's requests that met the objective.", labels=["objective"]
        )
        attained.add_metric(["ttft"], advice.ttft_attainment)
        attained.add_metric(["tpot"], advice.tpot_attainment)
        yield attained
