"""Log-probabilities that a client can join to the text: bytes, offsets and tokens as ids, over
characters of several tokens, streamed, whole and echoed, in chats, completions and responses."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from jdisagg.config import ServiceConfig
from jdisagg.dispatch.token_stream import TokenStream
from jdisagg.request import FinishReason, Request, StreamEvent, TokenLogprobs, Usage
from jdisagg.service.server import GenerationServer
from models.tokenizer import Tokenizer
from tests.checkpoints import LLAMA
from tests.service.doors import (
    EOS,
    MODEL,
    TEMPLATE,
    FakePath,
    byte_tokenizer,
    make_frontend,
    scores_of,
)
from tests.service.http_doors import (
    CHATS,
    COMPLETIONS,
    RESPONSES,
    HttpDoor,
    events,
    http_door,
    running,
)

TEXT = "aé漢😀 b\n"
PARTS = TEXT.encode()


@dataclass
class Decoded(FakePath):
    """Says tokens of `codec`, some an event, until a stop string is complete; `likely` beside each
    are others."""

    codec: Tokenizer = field(default_factory=byte_tokenizer)
    says: tuple[int, ...] = ()
    size: int = 1
    likely: tuple[tuple[int, float], ...] = ()

    async def stream(self, request: Request) -> AsyncIterator[StreamEvent]:
        self.requests.append(request)
        text, asks = TokenStream.of(self.codec, request), request.sampling.prompt_logprobs
        for first in range(0, len(self.says), self.size):
            made = text.push(self.says[first : first + self.size])
            some = self.says[first : first + self.size][: made.tokens_kept]
            last = made.stopped or first + self.size >= len(self.says)
            yield StreamEvent(
                0,
                first,
                some,
                made.text + (text.finish() if last else ""),
                tuple(TokenLogprobs(-0.5, ((one, -0.5), *self.likely)) for one in some),
                FinishReason.STOP if last else None,
                Usage(len(request.prompt_token_ids), first + len(some)) if last else None,
                prompt_logprobs=scores_of(request) if asks is not None and first == 0 else None,
            )
            if last:
                return


def words(size: int = 1, said: bytes = PARTS, special_at: int = 3) -> Decoded:
    """Says `TEXT`, one byte a token, with a special token within. Beside each token, two others are
    likely that are parts of characters."""
    ids = (*said[:special_at], EOS, *said[special_at:])
    return Decoded(says=ids, size=size, likely=((0x80, -2.0), (0x81, -3.0)))


def said_of(some: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """The text of a chat, and the rows of its tokens."""
    said = [one.get("delta") or one.get("message") or {} for one in some]
    rows = [row for one in some if one["logprobs"] for row in one["logprobs"]["content"]]
    return "".join(one.get("content") or "" for one in said), rows


async def choices(door: HttpDoor, path: str, **asked: Any) -> list[dict[str, Any]]:
    """The choice of a whole reply, or those of a stream's chunks."""
    answer = await door.served(path, asked)
    if not asked.get("stream"):
        return answer.fields["choices"]
    chunks = [json.loads(one) for one in events(answer.body)[:-1]]
    return [choice for chunk in chunks for choice in chunk["choices"]]


@pytest.mark.parametrize(
    ("size", "stream", "skip", "as_ids"),
    [(1, True, True, False), (2, False, False, False), (3, True, False, True)],
)
async def test_the_rows_of_a_chat_are_its_text(
    size: int, stream: bool, skip: bool, as_ids: bool
) -> None:
    async with http_door(words(size=size)) as door:
        asked = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
        more = {"top_logprobs": 3, "skip_special_tokens": skip}
        some = await choices(
            door, CHATS, **asked, **more, stream=stream, return_tokens_as_token_ids=as_ids
        )
        text, rows = said_of(some)
        assert b"".join(bytes(row["bytes"]) for row in rows).decode() == text
        assert len(rows) == len(PARTS) + 1
        ids = [*PARTS[:3], EOS, *PARTS[3:]]
        if as_ids:
            assert [row["token"] for row in rows] == [f"token_id:{one}" for one in ids]
        elif not skip:
            # a special token within a character damages no text of other tokens
            assert rows[3]["token"].endswith("<end>")
        for row, token_id in zip(rows, ids, strict=True):
            own, *parts = row["top_logprobs"]
            assert (own["token"], own["bytes"]) == (row["token"], row["bytes"])
            assert token_id in (0x80, 0x81) or [one["bytes"] for one in parts] == [[0x80], [0x81]]
            assert len({one["token"] for one in row["top_logprobs"]}) >= 2


@pytest.mark.parametrize(
    ("size", "stream", "echo", "as_ids"),
    [(1, True, True, False), (2, False, True, True), (3, True, False, False)],
)
async def test_the_tokens_of_a_completion_stand_where_their_offsets_say(
    size: int, stream: bool, echo: bool, as_ids: bool
) -> None:
    async with http_door(words(size=size, special_at=0)) as door:
        prompt = "x漢y"
        asked = {"prompt": prompt, "logprobs": 2, "echo": echo, "stream": stream}
        some = await choices(door, COMPLETIONS, **asked, return_tokens_as_token_ids=as_ids)
        text = "".join(one["text"] for one in some)
        assert text == (prompt if echo else "") + TEXT
        rows = [one["logprobs"] for one in some if one["logprobs"]]
        tokens = [token for row in rows for token in row["tokens"]]
        offsets = [offset for row in rows for offset in row["text_offset"]]
        ids = [*(prompt.encode() if echo else b""), EOS, *PARTS]
        assert len(tokens) == len(offsets) == len(ids)
        ends = [*offsets[1:], len(text)]
        places = [text[begin:end] for begin, end in zip(offsets, ends, strict=True)]
        assert "".join(places) == text
        # The last token of a character has its text, and the tokens before have none.
        expected = _expected(ids)
        assert places == expected
        if as_ids:
            assert tokens == [f"token_id:{one}" for one in ids]
        else:
            named = [
                place or ("<end>" * (one == EOS)) for place, one in zip(places, ids, strict=True)
            ]
            assert tokens == named
        tops = [top for row in rows for top in row["top_logprobs"]]
        for token, top in zip(tokens, tops, strict=True):
            assert top is None or token in top
        assert all(len(top) == 3 for top in tops[-3:])


def _expected(ids: list[int]) -> list[str]:
    texts, held = [], b""
    for one in ids:
        held += b"" if one == EOS else bytes([one])
        try:
            texts.append(held.decode())
            held = b""
        except UnicodeDecodeError:
            texts.append("")
    return texts


async def test_an_answer_that_ends_within_a_character_loses_no_byte() -> None:
    async with http_door(words(said=PARTS[:5], special_at=0)) as door:
        asked = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
        (one,) = await choices(door, CHATS, **asked)
        rows = one["logprobs"]["content"]
        assert b"".join(bytes(row["bytes"]) for row in rows) == PARTS[:5]
        assert "".join(row["token"] for row in rows[1:]) == PARTS[:5].decode("utf-8", "replace")


async def test_a_character_that_the_prompt_began_is_joined_to_it() -> None:
    async with http_door(words(said="é".encode()[1:] + b"x", special_at=2)) as door:
        prompt = [*b"a", "é".encode()[0]]
        (one,) = await choices(door, COMPLETIONS, prompt=prompt, logprobs=0)
        assert one["logprobs"]["tokens"] == ["é", "x", "<end>"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_rows_of_a_response_are_its_text(stream: bool) -> None:
    async with http_door(words(size=2)) as door:
        include = ["message.output_text.logprobs"]
        asked = {"input": "hi", "include": include, "top_logprobs": 1, "stream": stream}
        answer = await door.ask(RESPONSES, asked)
        body = answer.body if stream else b"data: " + answer.body
        (last,) = body.rstrip().rsplit(b"data: ", 1)[1:]
        response = json.loads(last)
        (part,) = response.get("response", response)["output"][0]["content"]
        assert part["text"] == TEXT
        assert b"".join(bytes(row["bytes"]) for row in part["logprobs"]).decode() == TEXT


async def test_parts_of_a_prompts_characters_are_told_apart() -> None:
    async with http_door(words()) as door:
        (one,) = await choices(door, COMPLETIONS, prompt="aé", prompt_logprobs=1)
        _, first, second = one["prompt_logprobs"]
        assert first[str(0xC3)]["decoded_token"] == ""
        assert second[str(0xA9)]["decoded_token"] == "é"
        assert first[str(0xC4)]["decoded_token"] == "bytes:\\xc4"


def test_the_bytes_of_a_models_tokens_are_its_text() -> None:
    tokenizer = Tokenizer.from_directory(LLAMA)
    for text in ("Once upon a time, é漢😀.", "  two  spaces\n\ttab", "x"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    (bos, *_) = tokenizer.encode("x")
    assert tokenizer.token_bytes(bos) == b"<s>" and tokenizer.token_bytes(10**9) == b""


def _sentencepiece() -> Tokenizer:
    import tokenizers
    from tokenizers import decoders, models, normalizers

    texts = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", *"abé", "▁ab"]
    texts += ["xST", "O", "P", "ab"]
    merges = [("▁", "▁"), ("a", "b"), ("▁", "ab")]
    backend = tokenizers.Tokenizer(
        models.BPE({text: at for at, text in enumerate(texts)}, merges=merges, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["</s>", "<|end|>"])
    return Tokenizer(backend, eos_ids=(1,), special_tokens={}, chat_templates={"default": TEMPLATE})


SAID = {
    "words": ["▁ab", "▁▁", "ab"],
    "bytes of characters": ["▁", *(f"<0x{byte:02X}>" for byte in "漢😀".encode()), "a"],
    "bytes of line breaks": ["<0x0A>", "a", "<0x0A>"],
    "a special token": ["a", "<|end|>", "<0xC3>", "<0xA9>"],
    "several spaces": ["▁▁", "▁▁", "é"],
    "a stop string": ["a", "é", "xST", "O", "P", "a"],
}


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize(("size", "stream"), [(1, True), (2, False)])
async def test_rows_of_a_sentencepiece_model_are_its_text(
    said: str, size: int, stream: bool
) -> None:
    codec = _sentencepiece()
    ids = tuple(codec.token_to_id(one) or 0 for one in SAID[said])
    path = Decoded(codec=codec, says=ids, size=size)
    model = replace(MODEL, vocabulary=512)
    frontend = make_frontend(path, model, codec=codec)
    server = GenerationServer(frontend, replace(ServiceConfig(), port=0, http_port=0))
    async with running(path, server, frontend) as door:
        asked: dict[str, Any] = {"stop": ["STOP"], "stream": stream}
        chat = {"messages": [{"role": "user", "content": "ab"}], "logprobs": True}
        some = await choices(door, CHATS, **asked, **chat)
        text, rows = said_of(some)
        # The rows of a stop string's tokens are there, and the text ends before it.
        assert b"".join(bytes(row["bytes"]) for row in rows).decode() == text + (
            "STOP" if said == "a stop string" else ""
        )
        echoed = await choices(door, COMPLETIONS, **asked, prompt=" ab é", logprobs=0, echo=True)
        whole = "".join(one["text"] for one in echoed)
        found = [one["logprobs"] for one in echoed if one["logprobs"]]
        tokens = [token for row in found for token in row["tokens"]]
        offsets = [offset for row in found for offset in row["text_offset"]]
        places = [whole[a:b] for a, b in zip(offsets, [*offsets[1:], len(whole)], strict=True)]
        assert "".join(places) == whole == " ab é" + text
        kept = [(place, token) for place, token in zip(places, tokens, strict=True) if place]
        assert said == "a stop string" or all(place == token for place, token in kept)
