"""anthropic-sdk-python: messages, their streams, tools in a loop, typed answers and errors."""

import anthropic
import checks
from checks import CITIES, CITY, KEY, MODEL, STORY, TOOL_TOKENS, Dog, strict

CHAT = [{"role": "user", "content": STORY}]
WEATHER = {"name": "weather", "description": "Of a city.", "input_schema": CITY}
ASKED = {"model": MODEL, "messages": CHAT, "extra_body": {"temperature": 0}}


def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)


def test_a_message_and_its_stream_say_the_same(url: str) -> None:
    asked = ASKED | {"max_tokens": 12, "system": "Be brief"}
    asked["extra_body"] = {"temperature": 0, "ignore_eos": True}
    whole = client(url).messages.create(**asked)
    strict(whole)
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 12
    with client(url).messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    strict(final)
    assert text == "".join(block.text for block in whole.content)
    assert [block.text for block in final.content] == [block.text for block in whole.content]
    assert final.usage.output_tokens == 12 and final.stop_reason == "max_tokens"
    for event in client(url).messages.create(**ASKED, max_tokens=4, stream=True):
        strict(event)


def test_a_stop_sequence_is_named(url: str) -> None:
    create = client(url).messages.create
    text = create(**ASKED, max_tokens=24).content[0].text
    stop = text.split()[3]
    reply = create(**ASKED, max_tokens=24, stop_sequences=[stop])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", stop)
    assert reply.content[0].text == text[: text.index(stop)]


def test_tokens_are_counted(url: str) -> None:
    counted = client(url).messages.count_tokens(model=MODEL, messages=CHAT, tools=[WEATHER])
    strict(counted)
    usage = client(url).messages.create(**ASKED, max_tokens=1, tools=[WEATHER]).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_a_tool_is_called_and_its_result_goes_back(url: str) -> None:
    create = client(url).messages.create
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        asked = ASKED | {"max_tokens": TOOL_TOKENS, "tools": [WEATHER]}
        one = choice | {"disable_parallel_tool_use": True}
        reply = create(**asked, tool_choice=one)
        strict(reply)
        (call,) = reply.content
        assert reply.stop_reason == "tool_use" and call.input["city"] in CITIES
        with client(url).messages.stream(**asked, tool_choice=one) as stream:
            pieces = [event.partial_json for event in stream if event.type == "input_json"]
            assert stream.get_final_message().content[0].input == call.input and pieces
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        history = [*CHAT, reply.to_param(), {"role": "user", "content": [result]}]
        more = create(model=MODEL, messages=history, max_tokens=8, tools=[WEATHER])
        strict(more)


def test_a_typed_answer(url: str) -> None:
    reply = client(url).messages.parse(**ASKED, max_tokens=TOOL_TOKENS, output_format=Dog)
    assert isinstance(reply.parsed_output, Dog)


def test_errors_have_their_types(url: str) -> None:
    create = client(url).messages.create
    for asked, kind in (
        ({"model": "other"}, anthropic.NotFoundError),
        ({"extra_body": {"temperature": -1.0}}, anthropic.BadRequestError),
        ({"messages": []}, anthropic.BadRequestError),
    ):
        try:
            create(**ASKED | {"max_tokens": 4} | asked)
            raise AssertionError("not refused")
        except kind as error:
            assert error.body["error"]["message"] and error.request_id


def test_a_breakpoint_is_created_and_then_read(url: str) -> None:
    """At a breakpoint whole blocks are created; the second call reads them."""
    control = {"type": "ephemeral", "ttl": "1h"}
    text = f"{anthropic.__version__} " + " ".join(f"Rule {at}." for at in range(80))
    system = [{"type": "text", "text": text, "cache_control": control}]
    create = client(url).messages.create
    first, again = (create(**ASKED, max_tokens=2, system=system) for _ in range(2))
    plain = create(**ASKED, max_tokens=2, system=text)
    for reply in (first, again, plain):
        strict(reply)
    created = first.usage.cache_creation_input_tokens
    assert created and created == again.usage.cache_read_input_tokens
    assert again.usage.cache_creation_input_tokens == 0
    assert plain.usage.cache_creation_input_tokens == 0
    with client(url).messages.stream(**ASKED, max_tokens=2, system=system) as stream:
        read = stream.get_final_message().usage.cache_read_input_tokens
    assert read == created
    total = first.usage.input_tokens + created + first.usage.cache_read_input_tokens
    assert total == again.usage.input_tokens + again.usage.cache_read_input_tokens


if __name__ == "__main__":
    checks.run(dict(globals()))
