"""instructor: answers as pydantic models, by each of its modes that this door serves."""

import checks
import instructor
import openai
from checks import KEY, MODEL, STORY, TOOL_TOKENS, Dog

MESSAGES = [{"role": "user", "content": STORY}]


def ask(url: str, mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key=KEY), mode=mode)


def test_by_a_tool_a_strict_tool_and_a_schema(url: str) -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": TOOL_TOKENS, "temperature": 0}
    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        chats = ask(url, mode).chat.completions
        assert isinstance(chats.create(**asked, response_model=Dog, max_retries=0), Dog)


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


if __name__ == "__main__":
    checks.run(dict(globals()))
