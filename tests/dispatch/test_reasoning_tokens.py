"""Usage says how many tokens of an answer were reasoning, marks included, in whatever pieces the
answer comes and wherever it is resumed. A token is a byte, so that the oracle is a length."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from jdisagg.chat.messages import ChatMessage, ChatPrompt
from jdisagg.chat.reasoning_count import cut_by_token
from jdisagg.request import AcceptedChild, FinishReason, Request, Resumption, StreamEvent, Usage
from tests.lanes import first_quick
from tests.service.doors import FakePath, make_frontend

THINK = "{{ messages[0].content }}<think>{{ '' }}</think>{% if thinking %}<think>{% endif %}"
PLAIN = "{{ messages[0].content }}"
HARMONY = "{{ messages[0].content }}<|channel|>analysis<|message|>{{ '' }}<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>"
THOUGHT = "<|channel|>analysis<|message|>so\n<|end|>"
ALOUD = "<|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
# Of each answer the parts that are reasoning come first, those that are none second.
ANSWERS: list[tuple[str, bool, list[tuple[str, str]]]] = [
    (THINK, False, [("<think>\nhm, é\n</think>", "\n\nwords")]),
    (THINK, False, [("\n<think>a</think>", "<think>b</think>")]),
    (THINK, True, [("a\n</think>", "\n\nb")]),
    (THINK, False, [("", "  just words")]),
    (THINK, False, [("<think>cut off </thi", "")]),
    (HARMONY, False, [(THOUGHT, FINAL + "words")]),
    (HARMONY, False, [(THOUGHT, ALOUD), ("<|start|>assistant" + THOUGHT, FINAL + "words")]),
]


@dataclass
class Answer(FakePath):
    """Says `text`, some tokens an event."""

    text: str = ""
    tokens: int = 1

    async def stream(self, request: Request) -> AsyncIterator[StreamEvent]:
        data = self.text.encode()
        had = request.resumption.children[0].token_ids if request.resumption else ()
        for first in range(len(had), len(data), self.tokens):
            end = min(first + self.tokens, len(data))
            before, shown = (data[:at].decode("utf-8", "ignore") for at in (first, end))
            last = end == len(data)
            yield StreamEvent(
                0,
                first,
                tuple(data[first:end]),
                shown[len(before) :],
                finish_reason=FinishReason.STOP if last else None,
                usage=Usage(len(request.prompt_token_ids), len(data)) if last else None,
            )


async def said(path: Answer, template: str, thinking: bool, had: int = 0) -> Usage:
    frontend = make_frontend(path, template=template)
    chat = ChatPrompt((ChatMessage("user", "hi"),), arguments={"thinking": thinking})
    resumed: dict[str, Any] = {}
    if had:
        known = AcceptedChild(tuple(path.text.encode()[:had]))
        resumed = {"resumption": Resumption(1, (known,))}
    request = await frontend.build_request(chat, request_id="r", **resumed)
    events = [event async for event in frontend.stream(request, chat)]
    assert events[-1].usage is not None and not any(event.usage for event in events[:-1])
    return events[-1].usage


@pytest.mark.parametrize(("tokens",), first_quick([(3,), (1000,), (1,), (7,)]))
@pytest.mark.parametrize(("template", "thinking", "parts"), ANSWERS)
async def test_reasoning_is_counted_with_its_marks(
    template: str, thinking: bool, parts: list[tuple[str, str]], tokens: int
) -> None:
    path = Answer(text="".join(a + b for a, b in parts), tokens=tokens)
    wanted = sum(len(thought.encode()) for thought, _ in parts)
    for had in (0, 1, len(path.text) // 2, len(path.text) - 1):
        usage = await said(path, template, thinking, had)
        assert usage.reasoning_tokens == wanted, had
        assert usage.completion_tokens == len(path.text.encode())


async def test_where_nobody_tells_reasoning_nothing_is_said_of_it() -> None:
    usage = await said(Answer(text="<think>a</think>b"), PLAIN, False)
    assert usage.reasoning_tokens is None


def test_a_text_is_cut_where_its_tokens_end() -> None:
    """Alone a token may have lost its space, or have no text."""
    assert cut_by_token(["<s>", "a", "dog", ""], "a dog") == ["", "a", " dog", ""]
    assert cut_by_token(["\ufffd", "\ufffd", "b"], "éb") == ["", "", "éb"]
    assert cut_by_token(["x"], "anything") == ["anything"]
