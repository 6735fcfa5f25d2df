"""Runs a router, which serves the public APIs with the workers that register with it. Needs no JAX.

    jdisagg router --port=8700
    jdisagg worker --role=prefill --layout=tp=2 --router=localhost:8700 --port=8701
    jdisagg worker --role=decode --layout=dp=2 --router=localhost:8700 --port=8702

The router reads the sections limits, routing, service and model of the recipe. One line on stdout
reports that the router listens. Its health service reports SERVING while a prefill and a decode
worker are registered and a small test request has recently passed through both. Several routers may
share the same workers. On SIGTERM new requests are refused, and running requests have
--drain_seconds to finish. A second signal ends the process at once.

With --elastic the router changes the roles of workers to meet a latency objective, for example
--set=elastic.slo.ttft_seconds=1 --set=elastic.slo.tpot_seconds=0.05. Give --elastic to one router
only. Without --elastic the router only recommends role changes (metrics, GetAdvice)."""

import asyncio
import contextlib
from dataclasses import replace

from jdisagg.errors import ConfigError
from jdisagg.node.router import Router, RouterConfig
from jdisagg.node.run_files import RouterProcessConfig, read_config
from jdisagg.node.serving import keep_for_good
from jdisagg.observe.decision_log import DecisionLog
from jdisagg.observe.logs import start_logging
from jdisagg.observe.process import check_ports, observing
from jdisagg.service.server import check_address
from jdisagg.supervisor.supervisor import EXIT_CONFIG
from launch.console import run
from launch.flags import HTTP, OBSERVE, SERVICE, define
from launch.grammars import grammar_compiler
from launch.settings import elastic_config, engine_config, observe_config
from launch.shipped import SHIPPED_MODEL
from models.hub import served_name
from models.peft_folder import check_adapter
from models.tokenizer import Tokenizer

REFUSED = EXIT_CONFIG
PARTS = ("elastic", "limits", "routing", "service")
flags = define(
    *("config", "model", "revision"),
    *SERVICE,
    *HTTP,
    *("canary_seconds", "elastic", "decision_log", "set", "config_file"),
    *OBSERVE,
)


def main() -> None:
    if not flags.config_file:  # so that errors of the configuration are logged in this format
        start_logging(flags.log_format, "router")
    config = (
        read_config(flags.config_file, RouterProcessConfig) if flags.config_file else _of_flags()
    )
    check_address(config.router.service)
    check_ports(config.observe, service=config.router.service)
    tokenizer = Tokenizer.from_directory(config.model)
    if flags.config_file:
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
    engine = engine_config(flags, weights=False, meshes=0, elastic=True)
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
        name = config.router.service.served_model_name or served_name(config.model)
        grammars = grammar_compiler(config.model)
        router = Router(
            config.router, tokenizer, name, observer, decisions, grammars, check_adapter
        )
        await router.run()


if __name__ == "__main__":
    run(main, flags, refused=REFUSED)
