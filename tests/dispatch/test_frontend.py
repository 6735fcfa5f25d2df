"""What a client says becomes a valid Request, or an error that names the field, the value and the
limit."""

import asyncio
import re
import threading
from dataclasses import replace

import pytest

from jdisagg.chat.messages import ChatMessage, ChatPrompt
from jdisagg.config import LimitsConfig
from jdisagg.dispatch.prompts import TokenPrompt
from jdisagg.errors import CancelledError, InvalidRequestError, OverloadedError, UnavailableError
from jdisagg.request import AcceptedChild, Resumption, SamplingDefaults
from jdisagg.settings.timeouts import RequestTimeouts, Timeouts
from tests.service.doors import EOS, MODEL, FakePath, byte_tokenizer, make_frontend

pytestmark = pytest.mark.real_time  # threads tokenize


@pytest.fixture
def frontend():
    return make_frontend(FakePath())


async def test_text_becomes_its_tokens_with_a_drawn_id_seed_and_the_default_deadline(
    frontend,
) -> None:
    first, second = await frontend.build_request("Hé"), await frontend.build_request("Hé")
    assert first.prompt_token_ids == tuple("Hé".encode())
    assert first.deadline_seconds == LimitsConfig().default_deadline_seconds
    assert first.stop_ids == (EOS,)
    assert first.request_id and first.request_id != second.request_id
    assert first.sampling.seed != second.sampling.seed


async def test_what_the_client_chose_is_kept(frontend) -> None:
    request = await frontend.build_request(
        TokenPrompt((5, 6)),
        request_id="mine",
        deadline_seconds=7.0,
        tenant="t",
        priority=3,
        seed=11,
        stop=["a"],
        stop_token_ids=[9],
        n=2,
        top_k=None,
    )
    assert request.request_id == "mine" and request.deadline_seconds == 7.0
    assert request.tenant == "t" and request.priority == 3
    assert request.sampling.seed == 11 and request.sampling.stop == ("a",)
    assert request.sampling.n == 2 and request.sampling.top_k == 0
    assert request.stop_ids == (EOS, 9)
    other = await frontend.build_request("a", ignore_eos=True, stop_token_ids=(9,), stop="end")
    assert (other.stop_ids, other.sampling.stop) == ((9,), ("end",))


async def test_chat_messages_go_through_the_template(frontend) -> None:
    request = await frontend.build_request(
        ChatPrompt((ChatMessage("system", "be"), ChatMessage("user", "hi")))
    )
    assert bytes(request.prompt_token_ids) == b"<system>be<user>hi<assistant>"


async def test_without_max_tokens_the_default_is_what_the_context_leaves(frontend) -> None:
    for prompt_tokens, options, expected in (
        (1, {}, 256),
        (300, {}, 212),
        (511, {}, 1),
        (1, {"min_tokens": 400}, 400),
        (12, {"max_tokens": 500}, 500),
    ):
        request = await frontend.build_request("x" * prompt_tokens, **options)
        assert request.sampling.max_tokens == expected, (prompt_tokens, options)


BAD = [
    ("", {}, "prompt is empty"),
    (TokenPrompt(()), {}, "token_ids is empty"),
    (ChatPrompt(()), {}, "messages are empty"),
    ("x" * 512, {}, "prompt has 512 tokens.*context of 512"),
    (TokenPrompt((1,) * 600), {}, "prompt has 600 tokens.*context of 512"),
    (
        "x" * 12,
        {"max_tokens": 501},
        "max_tokens=501 and the prompt's 12 tokens exceed the model's context of 512.*at most 500",
    ),
    ("x" * 12, {"min_tokens": 501}, "min_tokens=501 exceeds"),
    (TokenPrompt((3, 257)), {}, r"prompt token_ids\[1\]=257.*0 to 256"),
    (TokenPrompt((-1,)), {}, r"token_ids\[0\]=-1"),
    ("x", {"stop_token_ids": (257,)}, r"stop_token_ids\[0\]=257"),
    ("x", {"logit_bias": ((257, 1.0),)}, r"logit_bias\[0\]=257"),
    ("x", {"stop": (5,)}, "stop must hold"),
    ("x", {"stop": 5}, "stop must be a sequence"),
    ("x", {"stop": ("a\ud800",)}, "stop is not valid UTF-8"),
    ("a\ud800", {}, "prompt is not valid UTF-8 at character 1"),
    (ChatPrompt((ChatMessage("user", "\udfff"),)), {}, r"messages\[0\].content is not valid UTF-8"),
    ("x", {"request_id": "i" * 300}, "request_id.*256"),
    ("x", {"tenant": "i" * 300}, "tenant.*256"),
    ("x", {"priority": 2**40}, "priority"),
    (7, {}, "prompt must be text, got int"),
]


NAN, INF = float("nan"), float("inf")
RANGES: list[tuple[str, tuple[object, ...], str]] = [
    ("temperature", (-0.5, NAN, INF, -INF, 1e30), r"\[0.0, 100.0\], got"),
    ("top_p", (0.0, -0.1, 1.5, NAN), r"\(0.0, 1.0\]"),
    ("min_p", (-0.1, 1.1, NAN), r"\[0.0, 1.0\]"),
    ("top_k", (-1, 2**40), r"\[0, "),
    ("max_tokens", (0, -5, 2**62), r"\[1, 2147483647\], got"),
    ("seed", (-1, -(2**63)), r"\[0, "),
    ("presence_penalty", (-2.1, 3.0, NAN, INF), r"\[-2.0, 2.0\]"),
    ("frequency_penalty", (-9.0, 1e300, NAN), r"\[-2.0, 2.0\]"),
    ("repetition_penalty", (0.0, -1.0, INF, NAN), r"\[0.01, 100.0\]"),
    ("logprobs", (-1, 21), r"\[0, 20\]"),
    ("n", (0, -2, 65, 2**60), r"\[1, 64\]"),
]
BAD += [
    ("x", {field: value}, f"^{field} must be in {limits}")
    for field, values, limits in RANGES
    for value in values
]
BAD += [
    ("x", {"deadline_seconds": value}, "deadline_seconds must be positive and finite, got")
    for value in (0.0, -3.0, NAN, INF)
]
BAD += [
    ("x", {"min_tokens": 9, "max_tokens": 5}, r"min_tokens must be in \[0, 5\], got 9"),
    ("x", {"stop": tuple(map(str, range(17)))}, "stop may hold at most 16, got 17"),
    ("x", {"stop": ("",)}, "stop must hold non-empty strings"),
    ("x", {"stop": ("x" * 2000,)}, "stop string bytes may hold at most 1024, got 2000"),
    ("x", {"stop_token_ids": tuple(range(65))}, "stop_token_ids may hold at most 64, got 65"),
    ("x", {"logit_bias": ((3, NAN),)}, r"logit_bias\[3\] must be in \[-100.0, 100.0\], got nan"),
    ("x", {"logit_bias": ((3, 1.0), (3, 2.0))}, "contains a token id twice"),
    (
        "x",
        {"logit_bias": tuple((index % 250, 1.0) for index in range(513))},
        "logit_bias may hold at most 512, got 513",
    ),
]


async def test_a_bad_request_is_refused_by_field_value_and_limit(frontend) -> None:
    wrong = []
    for prompt, options, message in BAD:
        try:
            await frontend.build_request(prompt, **options)
            wrong.append((message, "was not refused"))
        except InvalidRequestError as error:
            if not re.search(message, str(error)):
                wrong.append((message, str(error)))
    assert not wrong


@pytest.mark.parametrize(
    "prompt", ["a <pad> b", ChatPrompt((ChatMessage("user", "<pad>"),))], ids=["text", "chat"]
)
async def test_a_token_that_the_tokenizer_has_and_the_model_has_not_is_refused(
    frontend, prompt
) -> None:
    frontend.prompts.codec = tokenizer = byte_tokenizer()
    tokenizer._backend.add_special_tokens(["<pad>"])
    assert tokenizer.encode("<pad>") == [frontend.model.vocabulary]
    for call in (frontend.tokenize, frontend.build_request):
        with pytest.raises(
            InvalidRequestError,
            match=(
                "prompt holds '<pad>', token 257 of the tokenizer.*its ids are 0 to 256; leave"
                " it out"
            ),
        ):
            await call(prompt)


class Untouchable:
    eos_ids = (EOS,)

    def __getattr__(self, name: str):
        raise AssertionError(f"{name} must not be asked for")


@pytest.mark.parametrize(
    "prompt",
    ["x" * 10_000_000, "é" * 3_000_000, ChatPrompt((ChatMessage("user", "x" * 3_000_000),) * 2)],
    ids=["ascii", "two bytes a letter", "chat"],
)
async def test_a_prompt_over_the_byte_limit_is_refused_before_it_is_tokenized(prompt) -> None:
    frontend = make_frontend(FakePath())
    frontend.prompts.codec = Untouchable()
    with pytest.raises(InvalidRequestError, match="bytes or more; at most 4194304"):
        await frontend.build_request(prompt)


class ThreadSpy:
    eos_ids = (EOS,)
    images = None

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.longest = 0
        self._codec = byte_tokenizer()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.threads.append(threading.current_thread())
        self.longest = max(self.longest, len(text))
        return self._codec.encode(text, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, messages, **how: object) -> str:
        return self._codec.apply_chat_template(messages, **how)


async def test_long_text_is_tokenized_off_the_event_loops_thread() -> None:
    frontend = make_frontend(FakePath())
    frontend.prompts.codec = spy = ThreadSpy()
    await frontend.tokenize("short")
    await frontend.tokenize("x" * 100_000)
    assert spy.threads[0] is threading.current_thread()
    assert spy.threads[1] is not threading.current_thread()


async def test_many_short_messages_are_long_text() -> None:
    frontend = make_frontend(FakePath())
    frontend.prompts.codec = spy = ThreadSpy()
    await frontend.tokenize(ChatPrompt((ChatMessage("user", ""),) * 3))
    await frontend.tokenize(ChatPrompt((ChatMessage("user", ""),) * 3000))
    assert spy.threads[0] is threading.current_thread()
    assert spy.threads[1] is not threading.current_thread()


@pytest.mark.parametrize("chat", [False, True])
async def test_a_text_far_beyond_the_context_is_refused_by_its_beginning(chat) -> None:
    frontend = make_frontend(FakePath())
    frontend.prompts.codec = spy = ThreadSpy()
    text = "x" * 4_000_000
    with pytest.raises(
        InvalidRequestError, match="prompt has more than 1024 tokens .* context holds 512"
    ):
        await frontend.build_request(ChatPrompt((ChatMessage("user", text),)) if chat else text)
    assert spy.longest < 50_000


async def test_an_id_is_free_again_once_its_request_has_ended() -> None:
    frontend = make_frontend(FakePath())
    request = await frontend.build_request("x", request_id="a", max_tokens=2)
    events = frontend.stream(request)
    await anext(events)
    other = replace(request, prompt_token_ids=(1, 2))
    with pytest.raises(InvalidRequestError, match="'a' is in use by a running request"):
        await anext(frontend.stream(other))
    assert len([event async for event in events]) == 1
    assert len([event async for event in frontend.stream(request)]) == 2


@pytest.mark.parametrize("resumption", [None, Resumption(1, (AcceptedChild(),))])
async def test_a_request_that_is_sent_again_replaces_its_broken_stream(
    resumption: Resumption | None,
) -> None:
    """The first stream is cut without a sign at the server."""
    path = FakePath()
    path.gate.clear()
    frontend = make_frontend(path)
    request = await frontend.build_request("x", request_id="a", max_tokens=2)
    first = frontend.stream(request)
    await anext(first)
    cut = asyncio.ensure_future(anext(first))
    again = frontend.stream(replace(request, resumption=resumption))
    assert (await anext(again)).first_index == 0
    with pytest.raises(CancelledError, match="sent again"):
        await cut
    path.gate.set()
    assert len([event async for event in again]) == 1


async def test_an_id_is_waited_for_while_the_stream_of_a_client_that_left_is_closed() -> None:
    closes = asyncio.Event()

    class Slow(FakePath):
        async def stream(self, request):  # type: ignore[no-untyped-def]
            try:
                async for event in super().stream(request):
                    yield event
            finally:
                if request.prompt_token_ids == (ord("x"),):
                    await closes.wait()

    frontend = make_frontend(Slow())
    gone = frontend.stream(await frontend.build_request("x", request_id="a"))
    await anext(gone)
    closing = asyncio.ensure_future(gone.aclose())
    other = await frontend.build_request("y", request_id="a", max_tokens=2)
    served = asyncio.ensure_future(anext(frontend.stream(other)))
    await asyncio.sleep(0)
    closes.set()
    assert (await served).first_index == 0
    await closing


async def test_a_request_resumed_while_its_broken_stream_is_not_over_is_asked_to_try_again():
    """Its client did nothing wrong: an INVALID_ARGUMENT would end the stream for good."""
    soon = Timeouts(request=RequestTimeouts(resumption_seconds=0.01))
    frontend = make_frontend(FakePath(), limits=LimitsConfig(timeouts=soon))
    request = await frontend.build_request("x", request_id="a", max_tokens=2)
    events = frontend.stream(request)
    await anext(events)
    again = replace(request, resumption=Resumption(1, (AcceptedChild(),)))
    with pytest.raises(UnavailableError, match="'a' is still being closed") as caught:
        await anext(frontend.stream(again))
    assert caught.value.retry_after_seconds is not None, "this is what a client goes by"
    await events.aclose()


@pytest.mark.ci
async def test_a_flood_of_the_longest_texts_is_refused_and_a_long_prompt_beside_it_answered(
    frontend,
) -> None:
    longest = "x" * (4 << 20)
    flood = [asyncio.create_task(frontend.tokenize(longest)) for _ in range(8)]
    await asyncio.sleep(0)
    with pytest.raises(InvalidRequestError, match="prompt has 20000 tokens"):
        await frontend.build_request("x" * 20_000)
    ends = await asyncio.gather(*flood, return_exceptions=True)
    assert [type(end) for end in ends] == [tuple] * 3 + [OverloadedError] * 5


WISHES = SamplingDefaults(max_tokens=300, temperature=0.6, top_k=20, repetition_penalty=1.1)


async def test_the_models_own_wishes_hold_where_a_request_says_nothing() -> None:
    frontend = make_frontend(FakePath(), replace(MODEL, sampling=WISHES))
    silent = (await frontend.build_request("x")).sampling
    assert (silent.temperature, silent.top_k, silent.top_p) == (0.6, 20, 1.0)
    assert (silent.repetition_penalty, silent.max_tokens) == (1.1, 300)
    room = MODEL.context_tokens - 400
    assert (await frontend.build_request("x" * 400)).sampling.max_tokens == min(300, room)


async def test_what_a_request_says_comes_before_the_models_wishes() -> None:
    frontend = make_frontend(FakePath(), replace(MODEL, sampling=WISHES))
    said = await frontend.build_request(
        "x", temperature=0.0, top_k=0, repetition_penalty=1.0, max_tokens=3
    )
    sampling = said.sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.0, 0, 3)
    assert not sampling.penalised
