"""How much processor time does the HTTP or gRPC server need per token?

    python -m benchmarks.http_door --streams=512 --tokens=200 --spans=1,4,16 --rounds=3
    --name=http_door

One process runs both servers over a `Frontend`. A fake request path replaces the engine: it sends
all streams their next span at once, like a decode step, when the last stream has requested it.
Clients run in a separate process and discard what they read. A figure is the server's CPU seconds
(all threads; kernel time for sockets also separately) divided by the tokens of a round. It is
measured over HTTP, over gRPC, and for streams that are read within the server's process ("no
door"), which is the cost of the path itself. With spans of 1, 4 or 16 tokens, each span is one
event and one frame. --uvloop uses uvloop instead of asyncio's event loop."""

import asyncio
import importlib
import resource
import statistics
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable

import grpc
import grpc.aio
from absl import app, flags

from benchmarks.measure import save
from jdisagg.config import LimitsConfig, Mode, ServiceConfig
from jdisagg.dispatch.frontend import Frontend
from jdisagg.dispatch.prompts import ModelInfo, TokenPrompt
from jdisagg.errors import JdisaggError
from jdisagg.layout.axes import Layout
from jdisagg.messages.ports import SessionCall, SessionReport
from jdisagg.messages.worker_status import WorkerStatus
from jdisagg.request import FinishReason, Request, SamplingDefaults, StreamEvent, Timings, Usage
from jdisagg.service.grpc import common_pb2
from jdisagg.service.grpc import generation_pb2 as pb
from jdisagg.service.server import GenerationServer

_STREAMS = flags.DEFINE_integer("streams", 512, "Streams at once.")
_TOKENS = flags.DEFINE_integer("tokens", 200, "Of each stream; a multiple of every span.")
_SPANS = flags.DEFINE_list("spans", ["1", "4", "16"], "Tokens that come together.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Interleaved rounds of each.")
_NAME = flags.DEFINE_string("name", "", "Name of the results file; '' prints only.")
_UVLOOP = flags.DEFINE_bool("uvloop", False, "Serve on uvloop.")
_CLIENT = flags.DEFINE_string("client", "", "Be the client of http:PORT or grpc:PORT.")

CHANNELS = 8
WORD = " word"
MODEL = ModelInfo("fake", "fake", 1000, 1 << 16, "float32", Mode.UNIFIED, None, Layout(), 0)


class FakeCodec:
    """Tokenizer in which every token is the same word."""

    eos_ids: tuple[int, ...] = ()
    sampling_defaults = SamplingDefaults()
    special_ids: tuple[int, ...] = ()
    images = embedding = None
    chat_template = None

    def token_bytes(self, token_id: int) -> bytes:
        return WORD.encode()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1]

    def decode(self, ids: object, *, skip_special_tokens: bool = True) -> str:
        return WORD

    def apply_chat_template(self, messages: object, **how: object) -> str:
        return WORD


class FakePath:
    """Request path that sends the next span to all streams together, when the last of them has
    requested it."""

    def __init__(self) -> None:
        self.span = 1
        self._asking = self._running = 0
        self._next: asyncio.Future[None] | None = None

    async def stream(self, request: Request) -> AsyncGenerator[StreamEvent, None]:
        count, span = request.sampling.max_tokens, self.span
        usual = StreamEvent(0, 0, (7,) * span, WORD * span)
        last = StreamEvent(
            0,
            0,
            usual.token_ids,
            usual.text,
            finish_reason=FinishReason.LENGTH,
            usage=Usage(1, count),
            timings=Timings(),
        )
        self._running += 1
        try:
            for _ in range(count // span - 1):
                await self._step()
                yield usual
            await self._step()
            yield last
        finally:
            self._running -= 1

    async def _step(self) -> None:
        """Returns when all running and expected streams wait for the next span."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        waiting, self._asking = self._next, self._asking + 1
        if self._asking == self._running and self._running == _STREAMS.value:
            self._asking, self._next = 0, None
            waiting.set_result(None)
        await waiting

    async def status(self) -> tuple[WorkerStatus, ...]:
        return ()

    async def suspend(self, tenant: str, request_id: str) -> None:
        raise NotImplementedError("no client suspends here")

    def resume(self, tenant: str, request_id: str) -> None:
        raise NotImplementedError("no client suspends here")

    def end(self, tenant: str, request_id: str, error: JdisaggError) -> None:
        raise NotImplementedError("no client repeats an id here")

    async def session(self, call: SessionCall) -> tuple[SessionReport, ...]:
        return ()

    async def reset_cache(self) -> int:
        return 0

    async def drain(self) -> None:
        """Does nothing, because the path keeps no state."""


async def _no_door(frontend: Frontend) -> None:
    async def read() -> None:
        request = await frontend.build_request(TokenPrompt((1,)), max_tokens=_TOKENS.value)
        async for _ in frontend.stream(request):
            pass

    await asyncio.gather(*(read() for _ in range(_STREAMS.value)))


async def _clients(kind: str, port: int) -> None:
    command = (sys.executable, "-m", "benchmarks.http_door", f"--client={kind}:{port}")
    sizes = (f"--streams={_STREAMS.value}", f"--tokens={_TOKENS.value}")
    client = await asyncio.create_subprocess_exec(*command, *sizes)
    if await client.wait():
        raise RuntimeError(f"the {kind} client failed; its words are above")


async def _measure() -> dict[str, object]:
    path = FakePath()
    limits = LimitsConfig(max_waiting_requests=4 * _STREAMS.value)
    frontend = Frontend(path, FakeCodec(), MODEL, limits)
    server = GenerationServer(frontend, ServiceConfig(port=0, http_port=0))
    port = await server.start()
    assert server.http is not None
    http_port = server.http.port
    ways: dict[str, Callable[[], Awaitable[None]]] = {
        "no door": lambda: _no_door(frontend),
        "http": lambda: _clients("http", http_port),
        "grpc": lambda: _clients("grpc", port),
    }
    tokens = _STREAMS.value * _TOKENS.value
    figures: dict[str, object] = {"streams": _STREAMS.value, "tokens of each": _TOKENS.value}
    figures["loop"] = "uvloop" if _UVLOOP.value else "asyncio"
    for span in map(int, _SPANS.value):
        path.span, seconds = span, {way: list[tuple[float, float]]() for way in ways}
        for _ in range(_ROUNDS.value):
            for way, run in ways.items():
                began = _cpu_seconds()
                await run()
                ended = _cpu_seconds()
                seconds[way].append((ended[0] - began[0], ended[1] - began[1]))
        best = {way: 1e6 * min(map(sum, some)) / tokens for way, some in seconds.items()}
        figures[f"span {span}"] = {
            way: {
                "us_per_token": round(best[way], 2),
                "median_us_per_token": round(1e6 * statistics.median(map(sum, some)) / tokens, 2),
                "kernel_us_per_token": round(1e6 * min(some, key=sum)[1] / tokens, 2),
                "tokens_per_second_a_core": round(1e6 / best[way]),
                "door_us_per_token": round(best[way] - best["no door"], 2),
                "door_us_per_frame": round(span * (best[way] - best["no door"]), 2),
            }
            for way, some in seconds.items()
        }
        print(f"span {span}:", figures[f"span {span}"], flush=True)
    server.force()
    await server.drain()
    return figures


def _cpu_seconds() -> tuple[float, float]:
    """Returns the processor seconds of this process, and of the kernel on its behalf."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime, used.ru_stime


async def _http(port: int) -> None:
    body = b'{"prompt": [1], "stream": true, "max_tokens": %d}' % _TOKENS.value
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    asked = head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(asked)
        tail = b""
        while data := await reader.read(1 << 16):
            tail = (tail + data)[-64:]
        writer.close()
        if b"[DONE]" not in tail:
            raise RuntimeError(f"a stream ended with {tail!r}")

    await asyncio.gather(*(one() for _ in range(_STREAMS.value)))


async def _grpc(port: int) -> None:
    sampling = common_pb2.SamplingParams(max_tokens=_TOKENS.value)
    asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), sampling=sampling)
    channels = [
        grpc.aio.insecure_channel(
            f"127.0.0.1:{port}", options=(("grpc.use_local_subchannel_pool", 1),)
        )
        for _ in range(CHANNELS)
    ]

    async def one(channel: grpc.aio.Channel) -> None:
        call = channel.unary_stream("/jdisagg.v1.GenerationService/Generate")
        async for _ in call(asked.SerializeToString()):
            pass

    await asyncio.gather(*(one(channels[at % CHANNELS]) for at in range(_STREAMS.value)))
    for channel in channels:
        await channel.close()


def main(_: object) -> None:
    if _CLIENT.value:
        kind, _, port = _CLIENT.value.partition(":")
        asyncio.run({"http": _http, "grpc": _grpc}[kind](int(port)))
        return
    factory = importlib.import_module("uvloop").new_event_loop if _UVLOOP.value else None
    with asyncio.Runner(loop_factory=factory) as runner:
        figures = runner.run(_measure())
    if _NAME.value:
        save(_NAME.value, figures)


if __name__ == "__main__":
    app.run(main)
