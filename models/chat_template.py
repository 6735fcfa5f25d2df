"""Renders a checkpoint's chat template with Jinja in a sandbox, and provides the helper functions
that published templates call.

Neither a checkpoint's template nor a client's messages may execute Python, so the environment is
immutable and sandboxed. A template that does not compile raises CheckpointError. Messages that the
template refuses raise InvalidRequestError."""

import contextlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jdisagg.errors import CheckpointError, InvalidRequestError


class _Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Refused(Exception):
    pass


class ChatTemplate:
    """A model's chat template, or several by name. `sources`: template text by name. "default"
    renders conversations. If "tool_use" is present, it renders conversations with tools, as in
    transformers."""

    def __init__(
        self, sources: Mapping[str, str], special_tokens: Mapping[str, str | list[str]]
    ) -> None:
        self._sources = dict(sources)
        self._special = dict(special_tokens)
        self._compiled: dict[str, jinja2.Template] = {}
        self._forms: dict[tuple[str, object, bool], _Forms] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        arguments: Mapping[str, object] | None = None,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> str:
        """Returns the prompt's text.

        Some templates refuse system messages that are not the first message. For them, all system
        messages are joined to one at the beginning.

        Args:
            messages: Conversation. Each message's content is a string, a list of parts, or None.
                Without images it is converted if the template supports only strings or only lists.
            continue_final_message: Whether the prompt ends directly after the last message's
                content, so that the model continues this message.

        Raises:
            InvalidRequestError: If the template refuses the messages or an argument.
            CheckpointError: If the template does not compile.
        """
        options = (add_generation_prompt, continue_final_message, arguments, tools)
        try:
            return self._rendered(messages, *options)
        except InvalidRequestError:
            joined = _with_one_system(messages)
            goes_on = continue_final_message and messages[-1].get("role") == "system"
            if joined == [*messages] or goes_on:
                raise
            with contextlib.suppress(InvalidRequestError):
                return self._rendered(joined, *options)
            raise

    def _rendered(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        arguments: Mapping[str, object] | None,
        tools: Sequence[Mapping[str, object]],
    ) -> str:
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        given = [self._in_form(name, message) for message in messages]
        mark = _continued(given) if continue_final_message else ""
        known: dict[str, object] = {
            "messages": given,
            "tools": [dict(tool) for tool in tools] or None,
            "add_generation_prompt": add_generation_prompt,
            **self._special,
        }
        if taken := sorted(known.keys() & (arguments or {}).keys()):
            raise InvalidRequestError(
                f"chat_template_kwargs must not set {taken[0]!r}, which the server passes to the"
                " template; remove it"
            )
        try:
            text = self._template(name).render({"documents": None, **(arguments or {}), **known})
        except _REFUSALS as error:
            raise InvalidRequestError(
                f"messages are refused by the model's chat template: {error}; send messages with"
                " the roles and order it expects"
            ) from error
        return _before_the_mark(text, mark) if mark else text

    def _in_form(self, name: str, message: Mapping[str, object]) -> dict[str, object]:
        content, role = message.get("content"), message.get("role")
        forms = self._forms_of(name, role, bool(message.get("tool_calls")))
        if role not in _USUAL_ROLES and not (forms.text or forms.one):
            raise InvalidRequestError(
                f"messages: the model's chat template displays no message of the role {role!r}; use"
                f" one of {', '.join(_USUAL_ROLES)}"
            )
        if content is None and "content" in message and not forms.none:
            content = ""
        if isinstance(content, Sequence) and not isinstance(content, str):
            images = any(part["type"] != "text" for part in content)
            if images and not forms.one:
                raise InvalidRequestError(
                    f"messages: the model's chat template displays no image of the role {role!r};"
                    " send images in messages of the user"
                )
            if not images and not forms.several:
                content = "\n".join(str(part["text"]) for part in content)
        if isinstance(content, str) and content and forms.one and not forms.text:
            content = [{"type": "text", "text": content}]
        return dict(message) if "content" not in message else {**message, "content": content}

    def _forms_of(self, name: str, role: object, calling: bool) -> "_Forms":
        if (name, role, calling) not in self._forms:
            if len(self._forms) >= _MOST_FORMS:  # clients choose the roles
                self._forms.clear()
            text = self._probe(name, role, calling, _PROBE)
            both = [{"type": "text", "text": text} for text in (_PROBE, _SECOND_PROBE)]
            parts = self._probe(name, role, calling, both)
            # A template that supports only text writes a list in the syntax of Python or JSON.
            one = _PROBE in parts and not _AS_DATA.search(parts)
            none = self._probe(name, role, calling, None)
            self._forms[name, role, calling] = _Forms(
                text=_PROBE in text,
                one=one,
                several=one and _SECOND_PROBE in parts,
                none=bool(none) and "None" not in none,
            )
        return self._forms[name, role, calling]

    def _probe(self, name: str, role: object, calling: bool, content: object) -> str:
        def other(text: str) -> object:
            parted = isinstance(content, list)
            return [{"type": "text", "text": text}] if parted else text

        user: dict[str, object] = {"role": "user", "content": other("a")}
        probe: dict[str, object] = {"role": role, "content": content}
        call = {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": {}}}
        calls = {"role": "assistant", "content": other(""), "tool_calls": [call]}
        result = {"role": "tool", "content": other("b"), "name": "f", "tool_call_id": "call00001"}
        around: dict[object, list[dict[str, object]]] = {
            "user": [probe],
            "assistant": [user, {**calls, **probe}, result] if calling else [user, probe, user],
            "tool": [user, calls, {**result, **probe}],
        }
        values = {"tools": None, "documents": None, "add_generation_prompt": False, **self._special}
        orders = [around[role]] if role in around else [[probe, user], [user, probe]]
        for messages in orders:
            try:
                return self._template(name).render({**values, "messages": messages})
            except _REFUSALS:
                continue
        return ""

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._sources:
            raise CheckpointError(
                f"the model has chat templates named {', '.join(sorted(self._sources))}, none named"
                " default; name one so, or send text instead of messages"
            )
        if name not in self._compiled:
            environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
                trim_blocks=True,
                lstrip_blocks=True,
                extensions=[_Generation, jinja2.ext.loopcontrols],
            )
            environment.filters["tojson"] = _to_json
            environment.globals["raise_exception"] = _raise
            environment.globals["strftime_now"] = _now
            try:
                self._compiled[name] = environment.from_string(self._sources[name])
            except jinja2.TemplateError as error:
                raise CheckpointError(
                    f"the model's chat template does not compile ({error}); correct it, or send"
                    " text instead"
                ) from error
        return self._compiled[name]


class _Forms(NamedTuple):
    text: bool
    one: bool
    several: bool
    none: bool


_MOST_FORMS = 64
_USUAL_ROLES = ("system", "user", "assistant", "tool")
_PROBE, _SECOND_PROBE = "jdisagg-probe", "jdisagg-second"
_AS_DATA = re.compile(rf"""text["']\s*:\s*["']{_PROBE}""")
_REFUSALS = (
    _Refused, jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError,
    ArithmeticError, RecursionError,
)  # fmt: skip


def _with_one_system(messages: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Joins all system messages to one, the first message. Texts are joined by an empty line."""
    of_system = [message for message in messages if message.get("role") == "system"]
    others = [message for message in messages if message.get("role") != "system"]
    if not of_system:
        return others
    contents = [content for message in of_system if (content := message.get("content"))]
    if all(isinstance(content, str) for content in contents):
        joined: object = "\n\n".join(map(str, contents))
    else:
        joined = [part for content in contents for part in _as_parts(content)]
        if any(part["type"] != "text" for part in joined):  # images must keep their order
            return [*messages]
    return [{**of_system[0], "content": joined}, *others]


def _as_parts(content: object) -> Sequence[dict[str, str]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content  # type: ignore


def _continued(messages: list[dict[str, object]]) -> str:
    """The prompt is cut where the marker appears in the rendered text, because the content itself
    may occur several times. The marker is a number that clients cannot guess, which filters such as
    `upper` and `escape` leave as it is."""
    content = messages[-1].get("content") if messages else None
    mark = f"{secrets.randbelow(10**20):020} "
    if isinstance(content, list) and content:
        if content[-1]["type"] != "text":
            raise InvalidRequestError(
                "continue_final_message is not possible: the last message ends with an image; end"
                " it with text"
            )
        last = {**content[-1], "text": str(content[-1]["text"]) + mark}
        messages[-1] = {**messages[-1], "content": [*content[:-1], last]}
    elif messages:
        messages[-1] = {**messages[-1], "content": f"{content or ''}{mark}"}
    return mark


def _before_the_mark(text: str, mark: str) -> str:
    at = text.rfind(mark.rstrip())
    if at < 0:
        raise InvalidRequestError(
            "continue_final_message is not possible: the model's chat template does not display the"
            " content of the last message; send a prompt instead of messages"
        )
    before = text[:at] if text[at:].startswith(mark) else text[:at].rstrip()
    # Some templates write the last message at a second place, too.
    return before.replace(mark, "").replace(mark.rstrip(), "")


def _raise(message: str) -> None:
    raise _Refused(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,  # noqa: E501
             sort_keys: bool = False) -> str:  # fmt: skip
    """Replaces Jinja's filter `tojson`, which would escape HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
