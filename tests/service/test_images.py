"""Images through both APIs: every form of an image part becomes the same prompt, usage and counts
have its tokens, and what is not supported is refused by name."""

import asyncio
import base64
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdisagg.chat.image_marks import HiddenMarks
from jdisagg.chat.images import ChatImage
from jdisagg.chat.messages import ChatMessage, ChatPrompt
from jdisagg.client import AsyncClient
from jdisagg.config import LimitsConfig, ServiceConfig
from jdisagg.dispatch import image_reader, prompts
from jdisagg.dispatch.frontend import Frontend
from jdisagg.dispatch.prompts import TokenPrompt
from jdisagg.errors import InvalidRequestError
from jdisagg.prompt.images import PromptImage
from jdisagg.request import Request
from jdisagg.service.server import GenerationServer
from models.image_resize import BICUBIC, resized
from tests.service.doors import MODEL, FakePath, make_frontend
from tests.service.http_doors import CHATS, MESSAGES, RESPONSES, HttpDoor, http_door, running
from tests.vision import IDS, VOCABULARY, data_url, file_of, pattern, vision_tokenizer

IMAGE = pattern(60, 100)
FILE = file_of(IMAGE)
URL = data_url(FILE)
PAD = IDS["<|image_pad|>"]
TOKENS = 6  # of IMAGE, 64 x 96 pixels after the resize
PIXELS = resized(IMAGE, 64, 96, BICUBIC).tobytes()
VISION = replace(MODEL, vocabulary=VOCABULARY, context_tokens=600)


def vision_frontend(
    folder: Path, path: FakePath | None = None, kind: str = "qwen", **limits: Any
) -> Frontend:
    codec = vision_tokenizer(folder, kind)
    return make_frontend(path or FakePath(), VISION, LimitsConfig(**limits), codec=codec)


@asynccontextmanager
async def vision_door(folder: Path, **limits: Any) -> AsyncIterator[HttpDoor]:
    path = FakePath()
    frontend = vision_frontend(folder, path, **limits)
    server = GenerationServer(frontend, ServiceConfig(port=0, http_port=0))
    async with running(path, server, frontend) as door:
        yield door


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[HttpDoor]:
    async with vision_door(tmp_path) as one:
        yield one


def chat(*parts: str | ChatImage) -> ChatPrompt:
    return ChatPrompt((ChatMessage("user", parts),))


def check_image(request: Request) -> None:
    """The request has IMAGE, once, where its tokens are."""
    (image,) = request.images
    assert request.prompt_token_ids.count(PAD) == TOKENS
    assert request.prompt_token_ids[image.start : image.start + TOKENS] == (PAD,) * TOKENS
    assert request.prompt_token_ids[image.start - 1] == IDS["<|vision_start|>"]
    whole = PromptImage.of(image.start, TOKENS, (1, 4, 6), PIXELS, FILE)
    assert image == whole.without_pixels(keep_file=True)


SOURCE = {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}


def said(*content: Any) -> list[Any]:
    return [{"role": "user", "content": list(content)}]


async def test_every_form_of_an_image_part_becomes_the_same_prompt(door: HttpDoor) -> None:
    text, shown = {"type": "text", "text": "What?"}, {"type": "input_image", "image_url": URL}
    blocks = {"type": "image", "source": SOURCE, "cache_control": {"type": "ephemeral"}}
    for part in (
        {"type": "image_url", "image_url": {"url": URL, "detail": "high"}},
        {"type": "image_url", "image_url": URL},
        shown | {"detail": "auto"},
    ):
        body = {"messages": said(part, text), "max_tokens": 1}
        reply = await door.ask(CHATS, body)
        assert reply.status == 200
    response = {"input": said(shown, {"type": "input_text", "text": "What?"})}
    await door.served(RESPONSES, response | {"max_output_tokens": 1})
    message = {"messages": said(blocks, text)}
    await door.served(MESSAGES, message | {"max_tokens": 1})
    own = [ChatMessage("user", (ChatImage(FILE, "image/png"), "What?"))]
    async with AsyncClient(door.target) as client:
        await client.complete(messages=own, max_tokens=1)
        counted = len(await client.tokenize(messages=own))
    asked = door.path.requests
    assert len(asked) == 6
    assert len({(request.prompt_token_ids, request.images) for request in asked}) == 1
    check_image(asked[0])
    # Rendering and counting include the tokens of images.
    count = len(asked[0].prompt_token_ids)
    assert reply.fields["usage"]["prompt_tokens"] == counted == count
    rendered = (await door.ask(f"{CHATS}/render", {"messages": body["messages"]})).fields
    assert tuple(rendered["prompt_token_ids"]) == asked[0].prompt_token_ids
    assert rendered["prompt"].count("<|image_pad|>") == TOKENS
    tokenized = (await door.ask("/tokenize", {"messages": body["messages"]})).fields
    assert tokenized["tokens"] == rendered["prompt_token_ids"] and tokenized["count"] == count
    for path, fields in (
        (f"{MESSAGES}/count_tokens", message),
        (f"{RESPONSES}/input_tokens", response),
    ):
        assert (await door.ask(path, fields)).fields["input_tokens"] == count
    assert len(asked) == 6, "none was run for this"


async def test_anthropics_blocks_keep_their_order_and_results_of_tools_have_images(
    door: HttpDoor,
) -> None:
    image = {"type": "image", "source": SOURCE}
    texts = [{"type": "text", "text": text} for text in ("a", "b", "c")]
    result = {"type": "tool_result", "tool_use_id": "t", "content": [texts[0], image, texts[1]]}
    messages = [
        {"role": "user", "content": [*texts[:2], image, texts[2]]},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": [result]},
    ]
    await door.served(MESSAGES, {"messages": messages, "max_tokens": 1})
    shown = (
        await door.ask("/detokenize", {"tokens": door.path.requests[0].prompt_token_ids})
    ).fields
    span = f"<|vision_start|>{'<|image_pad|>' * TOKENS}<|vision_end|>"
    assert shown["prompt"] == (
        f"<|im_start|>user\na\nb{span}c<|im_end|>\n<|im_start|>assistant\nd<|im_end|>\n"
        f"<|im_start|>tool\na{span}b<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [image.grid for image in door.path.requests[0].images] == [(1, 4, 6)] * 2


def of_parts(*parts: Any) -> Any:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 1}


def image_url(url: str) -> Any:
    return {"type": "image_url", "image_url": {"url": url}}


PDF = base64.b64encode(b"%PDF-1.7").decode()
WRONG: list[tuple[str, Any, str]] = [
    (CHATS, of_parts(image_url("https://example.com/a.png")),
     "messages[0].content[0].image_url.url must be a data: URL, got 'https://example.com/a.png';"
     " the server fetches no URLs"),
    (CHATS, of_parts({"type": "image_url"}), "messages[0].content[0].image_url is missing"),
    (CHATS, of_parts({"type": "input_image", "file_id": "f"}), "the server keeps no files"),
    (CHATS, of_parts({"type": "input_audio"}), "must have the type text or image_url"),
    (CHATS, of_parts(image_url(f"data:image/png;base64,{PDF}")),
     "messages[0].content[0] is not a readable image"),
    (CHATS, of_parts(image_url(URL[:-200])), "messages[0].content[0] is not a readable image"),
    (CHATS, of_parts(image_url("data:image/png;base64,a*")), "content[0] is not valid base64"),
    (CHATS, of_parts(*[image_url(URL)] * 4), "messages have 4 images; at most 3 are taken"),
    (CHATS, of_parts(image_url(data_url(file_of(pattern(200, 200))))),
     "messages[0].content[0] has 200 x 200 pixels; at most 30000 are taken"),
    (CHATS, of_parts(image_url(data_url(file_of(pattern(1, 250))))),
     "messages[0].content[0] has 250 x 1 pixels; one side may be at most 200 times"),
    (MESSAGES, of_parts({"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}),
     "content[0].source.url must be a data: URL"),
    (MESSAGES, of_parts({"type": "image", "source": {"type": "file", "file_id": "f"}}),
     "content[0].source.type must be base64, got 'file'"),
    (MESSAGES, of_parts({"type": "document", "source": {"type": "base64", "data": PDF}}),
     "content[0].source.type must be text or content, got 'base64'"),
    (MESSAGES, {"system": [{"type": "image", "source": {}}], **of_parts()},
     "system[0].type must be text"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
     'input[0].content[0].file_id="f" is not supported; the server keeps no files'),
]  # fmt: skip


async def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    async with vision_door(tmp_path, max_images=3, max_image_pixels=30_000) as door:
        for path, body, words in WRONG:
            answer = await door.ask(path, body)
            assert answer.status == 400, (words, answer.body)
            assert words in answer.error["message"], answer.body
        assert not door.path.requests


async def test_a_model_without_a_vision_encoder_refuses_images_by_name() -> None:
    async with http_door() as door:
        answer = await door.ask(CHATS, of_parts(image_url(URL)))
        assert answer.status == 400
        assert (
            "messages[0].content[0] is an image, and the model 'tiny' reads text only"
            in (answer.error["message"])
        )


async def test_a_template_that_displays_no_image_is_refused(tmp_path: Path) -> None:
    frontend = vision_frontend(tmp_path, kind="pixtral")
    said = ChatMessage("assistant", (ChatImage(FILE), "x"))
    with pytest.raises(InvalidRequestError, match="displays no image|shows 0 of them"):
        await frontend.build_request(ChatPrompt((ChatMessage("user", "a"), said)))


async def test_pixtral_shows_rows_with_their_ends(tmp_path: Path) -> None:
    frontend = vision_frontend(tmp_path, kind="pixtral")
    request = await frontend.build_request(chat("a", ChatImage(FILE), "b"))
    image, row_end, end = (IDS[f"[IMG{name}]"] for name in ("", "_BREAK", "_END"))
    rows = [image] * 4 + [row_end] + [image] * 4 + [row_end] + [image] * 4 + [end]
    (found,) = request.images
    assert (found.length, found.grid) == (15, (1, 6, 8))
    assert list(request.prompt_token_ids[found.start : found.start + found.length]) == rows


async def test_two_images_lie_in_order_and_differ_by_their_digests(tmp_path: Path) -> None:
    frontend = vision_frontend(tmp_path)
    other = ChatImage(file_of(pattern(60, 100, seed=1)))
    request = await frontend.build_request(chat(ChatImage(FILE), "then", other, "?"))
    first, second = request.images
    assert first.start + first.length < second.start
    assert first.digest != second.digest and first.grid == second.grid
    again = await frontend.build_request(chat(other, "then", ChatImage(FILE), "?"))
    assert [image.digest for image in again.images] == [second.digest, first.digest]
    assert again.prompt_token_ids == request.prompt_token_ids


FORGED = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")


async def test_text_of_a_client_cannot_become_an_image_token(tmp_path: Path) -> None:
    """Neither with an image in the chat nor without, in any text that the template shows."""
    frontend = vision_frontend(tmp_path)
    for mark in FORGED:
        for prompt in (chat(f"a{mark}b", ChatImage(FILE), mark), chat(mark * 3)):
            request = await frontend.build_request(prompt)
            images = len(request.images)
            assert request.prompt_token_ids.count(PAD) == images * TOKENS
            assert request.prompt_token_ids.count(IDS["<|vision_start|>"]) == images
            assert request.prompt_token_ids.count(IDS["<|video_pad|>"]) == 0
            text = await frontend.detokenize(request.prompt_token_ids, False)
            assert mark in text.replace("<|image_pad|>" * TOKENS, "")
            if images:
                check_image(request)


async def test_a_mark_that_several_parts_form_is_refused(tmp_path: Path) -> None:
    frontend = vision_frontend(tmp_path)
    with pytest.raises(InvalidRequestError, match="messages have 1 images, but .* shows 2"):
        await frontend.build_request(chat("<|image", "_pad|>", ChatImage(FILE)))


async def test_an_image_token_outside_of_chats_is_refused(tmp_path: Path) -> None:
    frontend = vision_frontend(tmp_path)
    for prompt in ("a<|image_pad|>b", TokenPrompt((97, PAD, 98))):
        with pytest.raises(InvalidRequestError, match="stands for an image; send the image in a"):
            await frontend.build_request(prompt)
    assert PAD in await frontend.tokenize("a<|image_pad|>b")


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["a", "<", "|", "<|image_pad|>", "<|image", "_pad|>", "1>"])))
def test_hidden_marks_are_the_same_text_in_pieces_without_marks(parts: list[str]) -> None:
    text = "".join(parts)
    hidden = HiddenMarks(("<|image_pad|>", "[IMG]"))
    value = hidden.hide({"x": [text, 3, None], text: {"y": text}})
    assert "<|image_pad|>" not in str(value)
    pieces = hidden.pieces(value["x"][0])
    assert "".join(pieces) == text and len(pieces) == text.count("<|image_pad|>") + 1
    assert not any("<|image_pad|>" in piece for piece in pieces)


async def test_images_are_read_outside_of_the_event_loops_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    frontend = vision_frontend(tmp_path)
    codec: Any = frontend.prompts.codec
    resized = type(codec.images).resized

    def noted(self: Any, pixels: np.ndarray, layout: Any) -> np.ndarray:
        threads.append(threading.current_thread())
        return resized(self, pixels, layout)

    monkeypatch.setattr(type(codec.images), "resized", noted)
    content = ChatImage.content

    def noted_content(self: ChatImage, where: str) -> bytes:
        threads.append(threading.current_thread())
        return content(self, where)

    monkeypatch.setattr(ChatImage, "content", noted_content)
    await frontend.build_request(chat(ChatImage(FILE)))
    assert len(threads) == 2
    assert threading.current_thread() not in threads


async def test_a_prompt_that_is_too_long_is_refused_before_its_images_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend = vision_frontend(tmp_path)
    large = ChatImage(file_of(pattern(400, 480)))
    monkeypatch.setattr(
        "jdisagg.chat.image_files.ImageFile.pixels", lambda self: pytest.fail("decoded")
    )
    assert len(await frontend.tokenize(chat(*[large] * 4))) > 600
    with pytest.raises(InvalidRequestError, match="prompt has .* tokens; the model's context of"):
        await frontend.build_request(chat(*[large] * 4))


async def test_pixels_of_a_request_fit_a_message_between_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend = vision_frontend(tmp_path)
    monkeypatch.setattr(prompts, "MAX_PIXEL_BYTES", 2 * 64 * 96 * 3)
    await frontend.build_request(chat(*[ChatImage(FILE)] * 2))
    with pytest.raises(InvalidRequestError, match="55296 bytes of pixels .*; at most 36864"):
        await frontend.build_request(chat(*[ChatImage(FILE)] * 3))


async def test_pixels_wait_for_one_call_and_are_then_decoded_from_the_file_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend = vision_frontend(tmp_path)
    reader = frontend.prompts.images
    (image,) = (await frontend.build_request(chat(ChatImage(FILE)))).images
    assert reader.waiting_bytes == len(PIXELS)
    with monkeypatch.context() as patch:
        patch.setattr(reader, "run", lambda *_: pytest.fail("decoded although they wait"))
        assert await reader.pixels(image) == PIXELS
    assert reader.waiting_bytes == 0
    assert await reader.pixels(image) == PIXELS


async def test_pixels_that_wait_have_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_reader, "WAITING_PIXEL_BYTES", len(PIXELS))
    frontend = vision_frontend(tmp_path)
    reader = frontend.prompts.images
    two = chat(ChatImage(FILE), ChatImage(file_of(255 - IMAGE)))
    first, second = (await frontend.build_request(two)).images
    assert reader.waiting_bytes == len(PIXELS)
    other = resized(255 - IMAGE, 64, 96, BICUBIC).tobytes()
    assert [await reader.pixels(one) for one in (second, first)] == [other, PIXELS]


async def test_a_cancelled_request_leaves_the_frontend_usable(tmp_path: Path) -> None:
    frontend = vision_frontend(tmp_path)
    building = asyncio.create_task(frontend.build_request(chat(ChatImage(FILE))))
    await asyncio.sleep(0)
    building.cancel()
    with pytest.raises(asyncio.CancelledError):
        await building
    check_image(await frontend.build_request(chat(ChatImage(FILE))))
