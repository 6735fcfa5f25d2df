"""instructor: answers as pydantic models, by each of its modes that this door serves."""

from typing import Literal

import checks
import instructor
import openai
from checks import KEY, MODEL, STORY, TOOL_TOKENS
from pydantic import BaseModel, ConfigDict


class Dog(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Literal["Rex", "Bo"]
    age: Literal[1, 2, 3]


MESSAGES = [{"role": "user", "content": STORY}]


def ask(url: str, mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key=KEY), mode=mode)


def dog(url: str, mode: instructor.Mode) -> Dog:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": TOOL_TOKENS, "temperature": 0}
    return ask(url, mode).chat.completions.create(**asked, response_model=Dog, max_retries=0)


def test_by_a_tool_that_is_named(url: str) -> None:
    assert isinstance(dog(url, instructor.Mode.TOOLS), Dog)


def test_by_a_schema(url: str) -> None:
    assert isinstance(dog(url, instructor.Mode.JSON_SCHEMA), Dog)


def test_by_a_tool_that_is_strict(url: str) -> None:
    assert isinstance(dog(url, instructor.Mode.TOOLS_STRICT), Dog)


def test_by_a_response(url: str) -> None:
    client = ask(url, instructor.Mode.RESPONSES_TOOLS)
    found = client.responses.create(
        model=MODEL, input=STORY, response_model=Dog, max_output_tokens=TOOL_TOKENS, max_retries=0
    )
    assert isinstance(found, Dog)


def test_partial_answers_of_a_stream(url: str) -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": TOOL_TOKENS, "temperature": 0}
    *_, last = ask(url, instructor.Mode.TOOLS).chat.completions.create_partial(
        **asked, response_model=Dog, max_retries=0
    )
    assert last.name in ("Rex", "Bo") and last.age in (1, 2, 3)


async def test_asynchronous(url: str) -> None:
    plain = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY)
    client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": TOOL_TOKENS, "temperature": 0}
    found = await client.chat.completions.create(**asked, response_model=Dog, max_retries=0)
    assert isinstance(found, Dog)


if __name__ == "__main__":
    checks.run(dict(globals()))
