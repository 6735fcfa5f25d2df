"""Serves a model from one process until SIGTERM or SIGINT.

    jdisagg serve
    jdisagg serve --config=configs/tiny_moe_cpu.py --slots_per_rank=16 --port=8700

--http_port is the port of the OpenAI-compatible API (docs/http.md), and --port the port of the gRPC
API (docs/grpc.md). The first line on stdout reports that the server is ready. The configuration is
a recipe (--config). Flags override fields of the recipe. --set overrides any field, also one
without a flag.

On SIGTERM new requests are refused, and running requests have --drain_seconds to finish. During
start-up SIGINT and SIGTERM stop the process at once (status 130 or 143). If a mesh fails, the
process exits with status 3, so that a supervisor can restart it."""

import asyncio
import contextlib
import os
from dataclasses import replace

from jdisagg.config import EngineConfig, ObserveConfig, ServiceConfig
from jdisagg.errors import UnavailableError
from jdisagg.node.deployment import prepare_engine
from jdisagg.node.serving import curl, serve_until_signalled, where
from jdisagg.node.signals import end_at_once
from jdisagg.observe import wrap
from jdisagg.observe.decision_log import DecisionLog
from jdisagg.observe.logs import say, start_logging
from jdisagg.observe.process import check_ports, observing
from jdisagg.router.decision import NO_ROUTER_EVENTS
from jdisagg.service.server import check_address
from jdisagg.supervisor.supervisor import EXIT_BROKEN
from launch.console import run
from launch.flags import ENGINE, HTTP, OBSERVE, SERVICE, define
from launch.model import deployment as deployment_of
from launch.settings import engine_config, observe_config

flags = define(*ENGINE, *SERVICE, *HTTP, *("devices", "decision_log"), *OBSERVE)


def main() -> None:
    end_at_once()
    start_logging(flags.log_format, "serve")
    config = engine_config(flags)
    check_address(config.service)
    observe = replace(observe_config(flags), metrics=config.service.http_port is not None)
    check_ports(observe, service=config.service)
    prepare_engine(config, flags.devices)
    log = DecisionLog(flags.decision_log) if flags.decision_log else contextlib.nullcontext()
    with log as decisions:
        broken = asyncio.run(_serve(config, observe, decisions))
    if broken is not None:
        say(f"error: {broken.message}", error=True)
        os._exit(EXIT_BROKEN)  # JAX's shutdown would wait for programs that may never end


async def _serve(
    config: EngineConfig, observe: ObserveConfig, decisions: DecisionLog | None
) -> UnavailableError | None:
    broken: UnavailableError | None = None
    async with observing("serve", observe) as observer:
        deployment = deployment_of(config, observer, decisions or NO_ROUTER_EVENTS)
        try:
            await deployment.start()
            if observer:
                observer.metrics.model = deployment.frontend.model.name
            log = wrap.request_log(
                observe.log_requests, observer, lambda: deployment.cluster.path.placer.waiting
            )

            def ready(service: ServiceConfig) -> None:
                name = deployment.frontend.model.name
                line = f"jdisagg serves {name} ({config.mode.value}) on {where(service)}"
                about = "\n".join(deployment.about())
                say(f"{line}\n{about}\n{curl(service)}".rstrip())

            broken = await serve_until_signalled(
                deployment.frontend, config.service, ready, deployment.cluster.broken, log, observer
            )
        finally:
            if broken is None:
                await deployment.stop()
    return broken


if __name__ == "__main__":
    run(main, flags)
