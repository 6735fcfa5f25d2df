"""Images from clients' files to the tokens of transformers: a data: URL of OpenAI's client, blocks
of Anthropic's API and bytes over gRPC give the greedy tokens of the golden fixtures."""

import base64
from pathlib import Path
from typing import Any

import pytest

from jdisagg.chat.images import ChatImage
from jdisagg.chat.messages import ChatMessage
from jdisagg.config import ServiceConfig
from jdisagg.prompt.images import PromptImage
from tests.end_to_end.doors import served
from tests.end_to_end.pictures import QWEN, SEEING, file
from tests.golden.images import golden_images, other_image
from tests.service.doors import FakePath
from tests.service.http_doors import HttpDoor
from tests.shapes import config
from tests.vision import data_url, seeing_checkpoint, written

GREEDY: Any = {"ignore_eos": True, "return_token_ids": True}


def texts(prompt: list[int], images: tuple[PromptImage, ...]) -> list[str]:
    """The text of a prompt before, between and after its images."""
    starts = [0, *(image.end for image in images)]
    ends = [*(image.start for image in images), len(prompt)]
    return [written(prompt[start:end]) for start, end in zip(starts, ends, strict=True)]


@pytest.mark.ci
async def test_images_of_every_api_give_the_tokens_of_transformers(tmp_path: Path) -> None:
    found, images = golden_images(QWEN)
    prompt, greedy = found["prompt"].tolist(), found["greedy"].tolist()
    first, second, third = texts(prompt, images)
    folder = seeing_checkpoint(QWEN, tmp_path)
    engine = config(directory=folder, **SEEING)
    async with served(engine, ServiceConfig(port=0, http_port=0, drain_seconds=5.0)) as server:
        door = HttpDoor(FakePath(), server.server)

        def content(*files: bytes) -> list[Any]:
            urls: list[Any] = [
                {"type": "image_url", "image_url": {"url": data_url(one)}} for one in files
            ]
            said = [{"type": "text", "text": text} for text in (first, second, third)]
            return [said[0], urls[0], said[1], urls[1], said[2]]

        files = [file(image) for image in images]
        async with door.client() as client:

            async def asked(*files: bytes) -> Any:
                return await client.chat.completions.create(
                    model=folder.name,
                    messages=[{"role": "user", "content": content(*files)}],
                    max_tokens=len(greedy),
                    temperature=0,
                    extra_body=GREEDY,
                )

            reply = await asked(*files)
            assert reply.choices[0].token_ids == greedy
            assert reply.prompt_token_ids == prompt
            assert reply.usage.prompt_tokens == len(prompt)
            other = await asked(file(other_image(images[0])), files[1])
            assert other.prompt_token_ids == prompt
            assert (await asked(*files)).choices[0].token_ids == greedy
            parts: list[Any] = [
                {"type": "input_text", "text": part["text"]}
                if part["type"] == "text"
                else {"type": "input_image", "image_url": part["image_url"]["url"]}
                for part in content(*files)
            ]
            response = await client.responses.create(
                model=folder.name,
                input=[{"role": "user", "content": parts}],
                max_output_tokens=len(greedy),
                temperature=0,
                extra_body=GREEDY,
            )
            assert response.output_text == reply.choices[0].message.content
            assert response.usage is not None and response.usage.input_tokens == len(prompt)
        blocks = [
            part if part["type"] == "text" else {"type": "image", "source": source(files[at // 2])}
            for at, part in enumerate(content(*files))
        ]
        fields = {"messages": [{"role": "user", "content": blocks}], "max_tokens": len(greedy)}
        message = await door.ask("/v1/messages", fields | {"temperature": 0, "ignore_eos": True})
        assert message.fields["usage"]["input_tokens"] + (
            message.fields["usage"]["cache_read_input_tokens"]
        ) == len(prompt)
        said = ChatMessage("user", (first, ChatImage(files[0]), second, ChatImage(files[1]), third))
        done = await server.client.complete(
            messages=[said], max_tokens=len(greedy), temperature=0, ignore_eos=True
        )
        assert list(done.choices[0].token_ids) == greedy
        for hostile in (
            files[0][: len(files[0]) // 2],
            b"GIF89a",
            b"\x89PNG\r\n\x1a\n" + bytes(99),
        ):
            body = {"messages": [{"role": "user", "content": content(hostile, files[1])}]}
            answer = await door.ask("/v1/chat/completions", body)
            assert answer.status == 400 and "is not a readable image" in answer.error["message"]
        await server.quiet()


def source(file: bytes) -> dict[str, str]:
    data = base64.b64encode(file).decode()
    return {"type": "base64", "media_type": "image/png", "data": data}
