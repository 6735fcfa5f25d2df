"""A byte tokenizer, a request path with known tokens, and a frontend over both, for tests of the
APIs. `http_doors.py` serves them."""

import asyncio
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jdisagg.chat.formats import AnswerFormat
from jdisagg.config import LimitsConfig, Mode
from jdisagg.dispatch.frontend import Frontend
from jdisagg.dispatch.prompts import ModelInfo
from jdisagg.errors import JdisaggError, OverloadedError, UnavailableError
from jdisagg.grammar.compiler import GrammarCompiler, TokenizerText
from jdisagg.layout.axes import Layout
from jdisagg.messages.ports import SessionAction, SessionCall, SessionReport
from jdisagg.messages.worker_status import KeptTier, WorkerRole, WorkerStatus
from jdisagg.prompt.experts import ChosenExperts
from jdisagg.prompt.logprobs import PromptLogprobs, PromptToken
from jdisagg.request import (
    CachedTokens,
    FinishReason,
    Request,
    StreamEvent,
    Timings,
    TokenLogprobs,
    Usage,
)
from jdisagg.settings.timeouts import RequestTimeouts, Timeouts
from models.tokenizer import Tokenizer
from tests.time_scale import seconds as seconds_of

EOS = 256
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt"
    " %}<assistant>{% endif %}"
)
MODEL = ModelInfo(
    name="tiny",
    family="llama",
    vocabulary=257,
    context_tokens=512,
    dtype="float32",
    mode=Mode.DISAGGREGATED,
    prefill_layout=Layout(tp=2),
    decode_layout=Layout(dp=2, tp=2, ep=4),
    kv_bytes_per_token=64,
)
CACHED = CachedTokens(pages=1, host=20, disk=300, peer=4000)  # of every prompt
STATUS = WorkerStatus(
    name="decode-0",
    role=WorkerRole.DECODE,
    layout="dp=2,tp=2,ep=4",
    free_pages=(3, 4),
    total_pages=(8, 8),
    running=1,
    waiting=0,
    slots=8,
    page_size=16,
    context_tokens=512,
    kept=(KeptTier("pages", 3, 3072, 8192), KeptTier("disk", 5, 5120, 1 << 33)),
)

# a busy machine may take its time to try a grammar
PATIENT = LimitsConfig(timeouts=Timeouts(request=RequestTimeouts(grammar_seconds=seconds_of(60))))


def byte_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """One token per byte, ids 0 to 255 in order of the byte, and an end token: what a text becomes
    is known without it."""
    templates = {} if template is None else {"default": template}
    return Tokenizer(byte_backend(), eos_ids=(EOS,), special_tokens={}, chat_templates=templates)


def byte_grammars() -> GrammarCompiler:
    """Of `byte_tokenizer`."""
    return GrammarCompiler(lambda: TokenizerText(byte_backend().to_str(), (EOS,)))


def byte_backend() -> tokenizers.Tokenizer:
    order = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    assert len(order) == 256
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={letter: _byte_of(letter) for letter in order} | {"<end>": EOS}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return backend


def _byte_of(letter: str) -> int:
    """GPT-2's byte alphabet: printable bytes stand for themselves, the others follow from 256
    on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return ord(letter) if ord(letter) in printable else others[ord(letter) - 256]


def expected_tokens(request: Request, child: int) -> tuple[int, ...]:
    start = sum(request.prompt_token_ids) + 31 * child
    return tuple(32 + (start + 7 * index) % 95 for index in range(request.sampling.max_tokens))


@dataclass
class FakePath:
    """Tokens are `expected_tokens`; a resumed request goes on where it was.

    `gate` unset holds every stream after its first token; tenants named here fail.
    """

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[Request] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    suspended: list[tuple[str, str, bool]] = field(default_factory=list)
    ended: dict[str, JdisaggError] = field(default_factory=dict)
    sessions: list[SessionCall] = field(default_factory=list)
    made_events: int = 0
    filler: str = ""
    pause_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.gate.set()

    async def stream(self, request: Request) -> AsyncIterator[StreamEvent]:
        self.requests.append(request)
        sampling = request.sampling
        try:
            if request.tenant == "crowd":
                raise OverloadedError("the queue holds 4 of 4 requests", retry_after_seconds=2.5)
            had = request.resumption.children if request.resumption is not None else ()
            for index in range(sampling.max_tokens):
                await asyncio.sleep(self.pause_seconds)
                for child in range(sampling.n):
                    if had and (
                        index < len(had[child].token_ids) or had[child].finish_reason is not None
                    ):
                        continue
                    token = expected_tokens(request, child)[index]
                    last = index + 1 == sampling.max_tokens
                    end = last and child + 1 == sampling.n
                    asks = sampling.prompt_logprobs is not None and index == child == 0
                    self.made_events += 1
                    yield StreamEvent(
                        child=child,
                        first_index=index,
                        token_ids=(token,),
                        text=chr(token) + self.filler,
                        logprobs=(
                            (TokenLogprobs(-0.5, ((token, -0.5),), experts_of(request, index)),)
                            if sampling.logprobs is not None
                            else ()
                        ),
                        finish_reason=FinishReason.LENGTH if last else None,
                        usage=(
                            Usage(
                                len(request.prompt_token_ids),
                                sampling.max_tokens * sampling.n,
                                CACHED.total,
                                cached_by_tier=CACHED,
                            )
                            if end
                            else None
                        ),
                        timings=Timings(ttft_seconds=0.25, kv_bytes_moved=640) if end else None,
                        prompt_logprobs=scores_of(request) if asks else None,
                    )
                await self._go_on(request.request_id)
                if request.tenant == "bug" and index == 1:
                    raise ZeroDivisionError("a bug of ours")
                if request.tenant == "lost" and index == 1:
                    raise JdisaggError("lost")
        finally:
            self.closed.append(request.request_id)

    async def status(self) -> tuple[WorkerStatus, ...]:
        return (STATUS,)

    async def suspend(self, tenant: str, request_id: str) -> None:
        self.suspended.append((tenant, request_id, True))

    def resume(self, tenant: str, request_id: str) -> None:
        self.suspended.append((tenant, request_id, False))

    async def _go_on(self, request_id: str) -> None:
        while not self.gate.is_set():
            if error := self.ended.pop(request_id, None):
                raise error
            await asyncio.wait((asyncio.ensure_future(self.gate.wait()),), timeout=0.01)

    def end(self, tenant: str, request_id: str, error: JdisaggError) -> None:
        self.ended[request_id] = error

    async def reset_cache(self) -> int:
        return 7

    async def session(self, call: SessionCall) -> tuple[SessionReport, ...]:
        """Of sessions that requests of the same tenant and scope named."""
        self.sessions.append(call)
        if call.session == "silent":
            raise UnavailableError("decode-0 did not answer")
        hinted = [one for one in self.requests if one.hints]
        known = {(one.tenant, one.cache_scope, one.hints.session) for one in hinted if one.hints}
        if (call.tenant, call.cache_scope, call.session) not in known:
            return ()
        if call.action is SessionAction.DROP:
            return (SessionReport("decode-0", dropped_tokens=32),)
        return (SessionReport("decode-0", 48, 32, 16, 0, 1.5, 298.5, 20.0),)

    async def drain(self) -> None: ...


def scores_of(request: Request) -> PromptLogprobs:
    """The letter behind each is likelier than it, and is named first."""
    top = request.sampling.prompt_logprobs or 0
    tokens = [
        PromptToken(-1.5, 2, ((after + 1, -0.25), (after, -1.5), (98, -4.0))[:top])
        for after in request.prompt_token_ids[1:]
    ]
    return PromptLogprobs.of(top, tokens)


def experts_of(request: Request, index: int) -> ChosenExperts | None:
    """Two layers choose one expert each, numbered by the position."""
    if not request.sampling.return_routed_experts:
        return None
    end = len(request.prompt_token_ids) + index
    positions = range(end) if index == 0 else range(end - 1, end)
    numbers = [position for position in positions for _ in range(2)]
    return ChosenExperts(2, 1, struct.pack(f"<{len(numbers)}h", *numbers))


def text_of(tokens: tuple[int, ...]) -> str:
    return "".join(map(chr, tokens))


def make_frontend(
    path: FakePath,
    model: ModelInfo = MODEL,
    limits: LimitsConfig | None = None,
    template: str = TEMPLATE,
    codec: Tokenizer | None = None,
) -> Frontend:
    """The model writes calls and reasoning as the template shows."""
    return Frontend(
        path,
        codec or byte_tokenizer(template),
        model,
        limits or PATIENT,
        answers=AnswerFormat.of(template),
        grammars=byte_grammars(),
    )


async def eventually(condition, seconds: float = 10.0) -> None:
    """Waits for what must happen; how soon is no one's concern here."""
    async with asyncio.timeout(seconds_of(seconds)):
        while not condition():
            await asyncio.sleep(0.005)
