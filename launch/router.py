"""A router: the generation service over workers that register with it. Needs no JAX, only the model's tokenizer.

    python -m launch.router --model=models/tiny/llama --port=8700
    python -m launch.worker --role=prefill --layout=tp=2 --router=localhost:8700 --name=prefill-0 --port=8701
    python -m launch.worker --role=decode --layout=dp=2 --router=localhost:8700 --name=decode-0 --port=8702

Prints one line on stdout when it listens. Health says SERVING while there is a worker for each half of a request, and a small request of
the router's own (a canary) went through two of them lately. Several routers may serve the same workers: workers own their reservations
and register with each. On SIGTERM new requests are refused and running ones finish, within --drain_seconds; a second signal ends
the waiting.

--elastic: prefill and decode workers change places as the load asks for it (jdisagg/router/elastic.py), so that the objective is met
(--set=elastic.slo.ttft_seconds=1 --set=elastic.slo.tpot_seconds=0.05); of several routers, for one alone. Without it the router only
advises: in its metrics, and on GetAdvice. launch.switch_role changes a role by hand.
"""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from absl import app, flags
from absl import logging as absl_logging

from jdisagg.config import EngineConfig, override
from jdisagg.errors import JdisaggError
from jdisagg.observe.decision_log import DecisionLog
from jdisagg.observe.logs import configure_logging
from jdisagg.observe.process import ObserveConfig, observing
from jdisagg.service.server import check_address
from jdisagg.supervisor.supervisor import EXIT_CONFIG
from launch.console import refuse_words
from launch.decisions import open_decision_log
from launch.observing import observe_config
from launch.recipes import load_recipe
from launch.router_life import Router, RouterConfig
from launch.shipped import SHIPPED_MODEL
from models.tokenizer import Tokenizer

_PARTS = ("elastic", "limits", "routing", "service")

_CONFIG = flags.DEFINE_string("config", None, "A recipe (launch/recipes.py): its limits, routing, service and model; flags win over it.")
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Interface to listen on.")
_PORT = flags.DEFINE_integer("port", 8700, "Port; 0 lets the system choose.")
_MODEL = flags.DEFINE_string("model", SHIPPED_MODEL, "Checkpoint directory; its tokenizer alone is read.")
_DRAIN = flags.DEFINE_float("drain_seconds", 30.0, "How long running requests may take at the end.")
_TLS_CERTIFICATE = flags.DEFINE_string("tls_certificate", "", "PEM file; with it the port speaks TLS alone.")
_TLS_KEY = flags.DEFINE_string("tls_key", "", "PEM file of the certificate's key.")
_TLS_CLIENT_CA = flags.DEFINE_string("tls_client_ca", "", "PEM file; clients and workers must show a certificate that it signed.")
_TOKEN_FILE = flags.DEFINE_string("token_file", "", "Bearer tokens of clients, one a line.")
_CLUSTER_TOKEN_FILE = flags.DEFINE_string("cluster_token_file", "", "The token that router and workers show each other.")
_CANARY = flags.DEFINE_float(
    "canary_seconds", 5.0, "How often a small request proves that KV moves, which readiness asks for; 0: never.", lower_bound=0
)
_ELASTIC = flags.DEFINE_bool("elastic", False, "Let workers change their roles as the load asks for it.")
_SET = flags.DEFINE_multi_string("set", [], "path.to.field=value of RouterConfig: limits.max_attempts=4; may be repeated.")
_SERVICE = (_HOST, _PORT, _DRAIN, _TLS_CERTIFICATE, _TLS_KEY, _TLS_CLIENT_CA, _TOKEN_FILE, _CLUSTER_TOKEN_FILE)


def main(argv: list[str]) -> int:
    absl_logging.set_verbosity(absl_logging.WARNING)
    try:
        refuse_words(argv)
        recipe = load_recipe(_CONFIG.value) if _CONFIG.value else EngineConfig()
        service = replace(recipe.service, **{holder.name: holder.value for holder in _SERVICE if holder.present})
        config = RouterConfig(recipe.limits, recipe.routing, service, changes_roles=_ELASTIC.value, canary_seconds=_CANARY.value)
        config = override(config, [text if text.split(".")[0] in _PARTS else f"limits.{text}" for text in _SET.value])
        directory = _MODEL.value if _MODEL.present else recipe.model.directory or SHIPPED_MODEL
        check_address(config.service)
        tokenizer = Tokenizer.from_directory(directory)
        observe = observe_config()
        configure_logging(observe.log_format, "router")
        with open_decision_log() as decisions:
            asyncio.run(_run(config, observe, tokenizer, Path(directory).resolve().name, decisions))
    except JdisaggError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return EXIT_CONFIG
    return 0


async def _run(config: RouterConfig, observe: ObserveConfig, tokenizer: Tokenizer, name: str, decisions: DecisionLog | None) -> None:
    async with observing("router", observe) as observer:
        await Router(config, tokenizer, name, observer, decisions).run()


if __name__ == "__main__":
    app.run(main)
