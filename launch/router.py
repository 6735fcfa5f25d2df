"""A router: the generation service over workers that register with it. Needs no JAX, only the
model's tokenizer.

    python -m launch.router --port=8700 --http_port=8000
    python -m launch.worker --role=prefill --layout=tp=2 --router=localhost:8700 --port=8701
    python -m launch.worker --role=decode --layout=dp=2 --router=localhost:8700 --port=8702

Of the recipe it takes limits, routing, service and model. Prints one line on stdout when it
listens. Health says SERVING while there is a worker for each half of a request, and a small request
of the router's own (a canary) went through two of them lately. Several routers may serve the same
workers: workers own their reservations and register with each. On SIGTERM new requests are refused
and running ones finish, within --drain_seconds; a second signal ends the waiting.

--elastic: prefill and decode workers change places as the load asks for it, so that the objective
is met (--set=elastic.slo.ttft_seconds=1 --set=elastic.slo.tpot_seconds=0.05); of several routers,
for one alone. Without it the router only advises: in its metrics, and on GetAdvice."""

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

from jdisagg.errors import ConfigError
from jdisagg.node.router import Router, RouterConfig
from jdisagg.node.run_files import RouterProcessConfig, read_config
from jdisagg.node.serving import keep_for_good
from jdisagg.observe.decision_log import DecisionLog
from jdisagg.observe.logs import start_logging
from jdisagg.observe.process import observing
from jdisagg.service.server import check_address
from jdisagg.supervisor.supervisor import EXIT_CONFIG
from launch.console import run
from launch.flags import HTTP, OBSERVE, SERVICE, define
from launch.grammars import grammar_compiler
from launch.settings import elastic_config, engine_config, observe_config
from launch.shipped import SHIPPED_MODEL
from models.tokenizer import Tokenizer

REFUSED = EXIT_CONFIG
PARTS = ("elastic", "limits", "routing", "service")
flags = define(
    *("config", "model"),
    *SERVICE,
    *HTTP,
    *("canary_seconds", "elastic", "decision_log", "set", "config_file"),
    *OBSERVE,
)


def main() -> None:
    config = (
        read_config(flags.config_file, RouterProcessConfig) if flags.config_file else _of_flags()
    )
    check_address(config.router.service)
    tokenizer = Tokenizer.from_directory(config.model)
    start_logging(config.observe.log_format, "router")
    log = DecisionLog(config.decision_log) if config.decision_log else contextlib.nullcontext()
    keep_for_good()
    with log as decisions:
        asyncio.run(_run(config, tokenizer, decisions))


def _of_flags() -> RouterProcessConfig:
    for text in flags.set:
        if text.split(".")[0] not in PARTS:
            raise ConfigError(
                f"--set={text}: a router has {', '.join(f'{part}.' for part in PARTS)} alone; name"
                " one of their fields, such as limits.max_attempts=4"
            )
    engine = engine_config(flags)
    router = RouterConfig(
        engine.limits,
        engine.routing,
        engine.service,
        elastic_config(flags),
        flags.elastic,
        flags.canary_seconds,
        flags.log_requests,
    )
    model = engine.model.directory or SHIPPED_MODEL
    observe = replace(observe_config(flags), metrics=engine.service.http_port is not None)
    return RouterProcessConfig(router, model, observe, flags.decision_log)


async def _run(
    config: RouterProcessConfig, tokenizer: Tokenizer, decisions: DecisionLog | None
) -> None:
    async with observing("router", config.observe) as observer:
        name = Path(config.model).resolve().name
        grammars = grammar_compiler(config.model)
        await Router(config.router, tokenizer, name, observer, decisions, grammars).run()


if __name__ == "__main__":
    run(main, flags, refused=REFUSED)
