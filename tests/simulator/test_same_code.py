"""The simulator runs the modules that serve: it imports what the live router and workers import,
and holds no copy."""

from tests.import_graph import product, reached

# Packages that decide and act on a request, live and simulated.
SHARED_ROOMS = (
    "jdisagg.costs.",
    "jdisagg.router.",
    "jdisagg.scheduler.",
    "jdisagg.worker.",
    "jdisagg.dispatch.",
)
# Modules that only a live process imports: text, streams, RPCs and operator calls. None of them
# decides on a request.
LIVE_ALONE = {
    "jdisagg.costs.catalog",
    "jdisagg.costs.kv_facts",
    "jdisagg.dispatch.frontend",
    "jdisagg.dispatch.client_limits",
    "jdisagg.dispatch.token_stream",
    "jdisagg.dispatch.roles",
    "jdisagg.dispatch.roles.elastic_pools",
    "jdisagg.dispatch.roles.role_switcher",
    "jdisagg.dispatch.routing_status",
    "jdisagg.dispatch.roles.outcomes",
    "jdisagg.router.elastic",
    "jdisagg.router.elastic_signals",
}


def rooms_of(*starts: str) -> set[str]:
    found: set[str] = set()
    for start in starts:
        ours, _ = reached(product(), start)
        found |= {module for module in ours if module.startswith(SHARED_ROOMS)}
    return found


def test_what_serves_a_request_live_serves_it_in_the_simulator() -> None:
    live = rooms_of("launch.router", "launch.worker", "launch.serve")
    simulated = rooms_of("jdisagg.simulator.run")
    assert len(live & simulated) > 80, "the walk reaches what both import"
    assert live - simulated <= LIVE_ALONE
    # Modules that only the simulator imports read decisions and plans; they are no second path.
    assert not {
        module
        for module in simulated - live
        if not module.startswith(("jdisagg.costs.", "jdisagg.router."))
    }
