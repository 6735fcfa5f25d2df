"""A cluster on fake meshes with everything observed that can be."""

from collections.abc import Awaitable, Callable

from jdisagg.observe import wrap
from jdisagg.observe.observer import Observer
from jdisagg.request import Request
from tests.fakes.cluster import Cluster, Collected
from tests.fakes.virtual_time import VirtualClock, run_virtually
from tests.observe.spans import TracedObserver


class ObservedCluster(Cluster):
    """Build inside `run_virtually`. `observed` stands where `path` stands."""

    def __init__(self, observer: Observer | None = None, **options: object) -> None:
        self.observer = observer or TracedObserver(
            "test", now=VirtualClock().now, wall=lambda: VirtualClock().now() + 1e9
        )
        super().__init__(
            wrap_prefill=lambda port: wrap.prefill("prefill0", port, self.observer),
            wrap_decode=lambda port: wrap.decode("decode0", port, self.observer),
            wrap_peer=lambda port: wrap.peer("decode0", port, self.observer),
            wrap_mesh=lambda name, mesh: wrap.mesh(name, mesh, self.observer),
            **options,  # type: ignore[arg-type]
        )
        self.observed = wrap.path(self.path, self.observer)
        metrics = self.observer.metrics
        metrics.watch_counters("path", self.path.counters)
        metrics.watch_worker("prefill0", self.prefill.status, self.prefill.counters)
        metrics.watch_worker("decode0", self.decode.status, self.decode.counters, lambda: 7)

    async def collect(self, request: Request) -> Collected:
        collected = Collected()
        async for event in self.observed.stream(request):
            collected.add(event)
        return collected


def on_a_cluster(
    **options: object,
) -> Callable[[Callable[[ObservedCluster], Awaitable[None]]], Callable[[], None]]:
    """Makes a test of a coroutine that gets a cluster with these options, in virtual time."""

    def decorate(test: Callable[[ObservedCluster], Awaitable[None]]) -> Callable[[], None]:
        def run() -> None:
            async def main() -> None:
                async with ObservedCluster(**options) as cluster:  # type: ignore[arg-type]
                    await test(cluster)

            run_virtually(main)

        run.__name__, run.__doc__ = test.__name__, test.__doc__  # type: ignore[attr-defined]
        return run

    return decorate
