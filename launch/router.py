"""A router: the generation service over workers that register with it. Needs no JAX, only the model's tokenizer.

    python -m launch.router --model=models/tiny/llama --port=8700
    python -m launch.worker --role=prefill --layout=tp=2 --router=localhost:8700 --name=prefill-0 --port=8701
    python -m launch.worker --role=decode --layout=dp=2 --router=localhost:8700 --name=decode-0 --port=8702

Prints one line on stdout when it listens. Health says NOT_SERVING until there is a worker for each half of a request. Several routers
may serve the same workers: workers own their reservations and register with each. On SIGTERM new requests are refused and running ones
finish, within --drain_seconds; a second signal ends the waiting.
"""

import asyncio
import sys
from pathlib import Path

from absl import app, flags
from absl import logging as absl_logging

from jdisagg.clock import MonotonicClock
from jdisagg.config import LimitsConfig, Mode, ServiceConfig, override
from jdisagg.dispatch.frontend import Frontend, ModelInfo
from jdisagg.dispatch.ports import WorkerRole
from jdisagg.dispatch.request_path import RequestPath
from jdisagg.dispatch.roster import Roster, WorkerCard, WorkerPorts
from jdisagg.dispatch.token_stream import TokenStream
from jdisagg.errors import JdisaggError
from jdisagg.layout.axes import Layout
from jdisagg.request import Request
from jdisagg.service.connection import Credentials
from jdisagg.service.registry import registry_service
from jdisagg.service.remote_ports import RemoteWorker
from jdisagg.service.server import GenerationServer, check_address, cluster_credentials, read_tokens
from jdisagg.supervisor.supervisor import EXIT_CONFIG
from launch.shipped import SHIPPED_MODEL
from launch.signals import Signals
from models.tokenizer import Tokenizer

SWEEP_SECONDS = 0.25
# What is said of the model before the first worker has registered; requests are refused until then.
_UNKNOWN_CONTEXT = 1 << 24

_HOST = flags.DEFINE_string("host", "127.0.0.1", "Interface to listen on.")
_PORT = flags.DEFINE_integer("port", 8700, "Port; 0 lets the system choose.")
_MODEL = flags.DEFINE_string("model", SHIPPED_MODEL, "Checkpoint directory; its tokenizer alone is read.")
_DRAIN = flags.DEFINE_float("drain_seconds", 30.0, "How long running requests may take at the end.")
_TLS_CERTIFICATE = flags.DEFINE_string("tls_certificate", "", "PEM file; with it the port speaks TLS alone.")
_TLS_KEY = flags.DEFINE_string("tls_key", "", "PEM file of the certificate's key.")
_TLS_CLIENT_CA = flags.DEFINE_string("tls_client_ca", "", "PEM file; clients and workers must show a certificate that it signed.")
_TOKEN_FILE = flags.DEFINE_string("token_file", "", "Bearer tokens of clients, one a line.")
_CLUSTER_TOKEN_FILE = flags.DEFINE_string("cluster_token_file", "", "The token that router and workers show each other.")
_SET = flags.DEFINE_multi_string("set", [], "limits or service settings: max_waiting_requests=64; may be repeated.")


def main(_: list[str]) -> int:
    absl_logging.set_verbosity(absl_logging.WARNING)
    try:
        service = ServiceConfig(
            _HOST.value,
            _PORT.value,
            drain_seconds=_DRAIN.value,
            tls_certificate=_TLS_CERTIFICATE.value,
            tls_key=_TLS_KEY.value,
            tls_client_ca=_TLS_CLIENT_CA.value,
            token_file=_TOKEN_FILE.value,
            cluster_token_file=_CLUSTER_TOKEN_FILE.value,
        )
        limits = override(LimitsConfig(), _SET.value)
        check_address(service)
        tokenizer = Tokenizer.from_directory(_MODEL.value)
    except JdisaggError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return EXIT_CONFIG
    asyncio.run(Router(service, limits, tokenizer, Path(_MODEL.value).resolve().name).run())
    return 0


class Router:
    """Build it where the loop runs."""

    def __init__(self, service: ServiceConfig, limits: LimitsConfig, tokenizer: Tokenizer, name: str) -> None:
        self._service = service
        self._clock = MonotonicClock()
        self._name = name
        self._tokenizer = tokenizer
        self._limits = limits
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Serves until it is signalled, then drains."""
        credentials = cluster_credentials(self._service)
        roster = Roster(self._clock, lambda card: _open_ports(card, credentials))
        roster.on_change = self._changed.set
        path = RequestPath(
            roster.prefill, roster.decode, self._text_of, self._limits, self._clock, address=roster.address, statuses=roster.statuses
        )
        frontend = Frontend(path, self._tokenizer, _model_info(roster, self._name, self._tokenizer.vocabulary), self._limits)
        server = GenerationServer(frontend, self._service, others=[registry_service(roster, read_tokens(self._service.cluster_token_file))])
        signals = Signals(server.hurry)
        port = await server.start()
        await server.set_ready(False)
        watching = asyncio.create_task(self._watch(roster, server, frontend))
        print(f"jdisagg router listens on {self._service.host}:{port}", flush=True)
        try:
            await signals.first()
            await server.drain()
        finally:
            watching.cancel()
            roster.close()
            await asyncio.gather(watching, return_exceptions=True)

    async def _watch(self, roster: Roster, server: GenerationServer, frontend: Frontend) -> None:
        """Forgets silent workers; keeps what the door says of model and health up to date."""
        ready = False
        while True:
            for card in roster.sweep():
                print(f"worker {card.name} at {card.address} is silent: given up until it registers again", flush=True)
            if self._changed.is_set():
                self._changed.clear()
                frontend.model = _model_info(roster, self._name, self._tokenizer.vocabulary)
                known = ", ".join(sorted(f"{card.name} ({card.role.value} {card.layout})" for card in roster.cards()))
                print(f"workers: {known or 'none'}", flush=True)
            if roster.ready is not ready:
                ready = roster.ready
                await server.set_ready(ready)
                print("serving" if ready else "not serving: a prefill and a decode worker are needed, or a mixed one", flush=True)
            try:
                await asyncio.wait_for(self._changed.wait(), SWEEP_SECONDS)
            except TimeoutError:
                continue

    def _text_of(self, request: Request) -> TokenStream:
        return TokenStream(self._tokenizer, request.prompt_token_ids, request.sampling.stop, request.sampling.min_tokens)


def _open_ports(card: WorkerCard, credentials: Credentials) -> WorkerPorts:
    worker = RemoteWorker(card.address, credentials, card.boot_id)
    if card.role is WorkerRole.PREFILL:
        return WorkerPorts(prefill=worker.prefill, close=worker.close)
    return WorkerPorts(decode=worker.decode, close=worker.close)


def _model_info(roster: Roster, name: str, vocabulary: int) -> ModelInfo:
    """The workers' model; until there is one, what the tokenizer knows."""
    model = roster.model
    cards = sorted(roster.cards(), key=lambda card: card.name)
    prefill = [card.layout for card in cards if card.role is WorkerRole.PREFILL]
    decode = [card.layout for card in cards if card.role is not WorkerRole.PREFILL]
    mixed = any(card.role is WorkerRole.MIXED for card in cards)
    return ModelInfo(
        name=model.name if model else name,
        family=model.family if model else "",
        vocabulary=model.vocabulary if model else vocabulary,
        context_tokens=model.context_tokens if model else _UNKNOWN_CONTEXT,
        dtype=model.dtype if model else "float32",
        mode=Mode.CHUNKED if mixed and not prefill else Mode.DISAGGREGATED,
        prefill_layout=prefill[0] if prefill else None,
        decode_layout=decode[0] if decode else Layout(),
        kv_bytes_per_token=model.kv_bytes_per_token if model else 0,
    )


if __name__ == "__main__":
    app.run(main)
