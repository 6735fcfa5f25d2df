"""A checkpoint's chat template: Jinja in a sandbox, with the helpers that published templates
expect.

Templates come with checkpoints and messages from clients; neither may reach Python through the
other, so the environment is immutable and sandboxed. A template that does not compile is the
checkpoint's fault, messages that it refuses are the client's."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jdisagg.errors import CheckpointError, InvalidRequestError


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; in serving it only shows its
    body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Refused(Exception):
    """What `raise_exception` in a template raises."""


class ChatTemplate:
    """Renders messages to text. `special_tokens` are visible to the template by name (bos_token,
    eos_token, ...)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        arguments: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> str:
        """`tools`: as OpenAI's API writes them. Raises `InvalidRequestError` for messages or
        arguments the template does not take, `CheckpointError` if it is no template."""
        given = [dict(message) for message in messages]
        known: dict[str, object] = {
            "messages": given,
            "tools": [dict(tool) for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self._special,
        }
        if taken := sorted(known.keys() & (arguments or {}).keys()):
            raise InvalidRequestError(
                f"chat_template_kwargs names {taken[0]!r}, which the server gives the template"
                " itself; leave it out"
            )
        try:
            text = self._template.render({**(arguments or {}), **known})
        except (
            _Refused,
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise InvalidRequestError(
                f"messages are refused by the model's chat template: {error}; send messages with"
                " the roles and order it expects"
            ) from error
        return _within_the_last(text, given) if continue_final_message else text

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        try:
            return environment.from_string(self._source)
        except jinja2.TemplateError as error:
            raise CheckpointError(
                f"the model's chat template does not compile ({error}); correct it, or send text"
                " instead"
            ) from error


def _within_the_last(text: str, messages: Sequence[Mapping[str, object]]) -> str:
    """The text up to the end of the last message's words, which templates may strip."""
    words = str(messages[-1].get("content", "")).lstrip() if messages else ""
    for shown in (words, words.rstrip()):
        if shown and (at := text.rfind(shown)) >= 0:
            return text[: at + len(shown)]
    raise InvalidRequestError(
        "continue_final_message cannot be done: the last message has no words, or the model's chat"
        " template does not show them as they are; send a prompt instead"
    )


def _raise(message: str) -> None:
    raise _Refused(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,  # noqa: E501
             sort_keys: bool = False) -> str:  # fmt: skip
    """Plain JSON: Jinja's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
