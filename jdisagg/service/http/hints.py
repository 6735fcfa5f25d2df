"""Reads what clients tell about their requests (`Hints`) from the fields of other servers.

| field | whose | what is read |
|---|---|---|
| `prompt_cache_key` | OpenAI | session |
| `prompt_cache_retention` | OpenAI | retention of prompt and answer |
| `cache_control` | Anthropic, LiteLLM | retention of the prompt up to the last block that has it |
| `session_id` | vLLM, SGLang | session; it takes precedence |
| `nvext.cache_control` | Dynamo | retention of prompt and answer |
| `nvext.agent_hints.priority` | Dynamo | weight of the retention |
| `nvext.agent_hints.osl` | Dynamo | expected length of the answer |
| `nvext.agent_hints.pause_seconds` | - | pause until the session's next turn |

The reply's header lists other fields of `nvext` as ignored."""

from jdisagg.errors import InvalidRequestError
from jdisagg.plain import plain
from jdisagg.prompt.hints import MAX_RETENTION_WEIGHT, Hints, Retention
from jdisagg.service.http.bodies import CacheControl, HintFields
from jdisagg.service.http.fields import ANYTHING, Fields

# Seconds after the last use for which a prompt is retained, by what the client sends.
SECONDS = {"5m": 300.0, "1h": 3600.0, "in_memory": 600.0, "in-memory": 600.0, "24h": 86_400.0}
# With this weight, a block that nobody uses outlasts blocks of now for 4/5 of its retention.
USUAL_WEIGHT = 4.0
# Fields that the chat template writes into the prompt, in this order.
_PROMPT = ("tools", "system", "instructions", "messages", "input")
_MARK = b'"cache_control"'
_IMAGE_CHARACTERS = 1000  # counted for an image in place of its base64 text
_MOST_DEPTH = 8  # of nested blocks


@plain
class SentHints:
    """The hints in the body of a request.

    Attributes:
        hints: None if the request has none.
        retained_part: Part of the prompt's text that is retained.
    """

    hints: Hints | None = None
    retained_part: float = 1.0


def hints_from(fields: Fields) -> SentHints:
    """Raises InvalidRequestError, which names the invalid field."""
    sent = fields.fill(HintFields)
    agent = sent.nvext and sent.nvext.agent_hints
    session = sent.session_id or sent.prompt_cache_key or ""
    weight = USUAL_WEIGHT + max(0, agent.priority) if agent else USUAL_WEIGHT
    seconds = [_seconds("prompt_cache_retention", sent.prompt_cache_retention)]
    seconds.append(_of_control("cache_control", sent.cache_control))
    seconds.append(_of_control("nvext.cache_control", sent.nvext and sent.nvext.cache_control))
    if agent and agent.priority > 0:
        seconds.append(SECONDS["5m"])
    part, at_blocks = 1.0, None
    if not any(seconds):
        part, at_blocks = _breakpoint(fields)
        seconds.append(at_blocks)
    longest = max([one for one in seconds if one is not None], default=None)
    retention = None
    if longest is not None:
        retention = Retention(min(weight, MAX_RETENTION_WEIGHT), longest)
    answer_tokens = agent.osl if agent else 0
    pause_seconds = agent.pause_seconds if agent else 0.0
    if pause_seconds and not session:
        raise InvalidRequestError(
            f"nvext.agent_hints.pause_seconds={pause_seconds:g} is that of a session; send its key,"
            " as session_id or prompt_cache_key"
        )
    if not (session or retention or answer_tokens):
        return SentHints()
    hints = Hints(
        session, retention, answer_tokens=max(0, answer_tokens), pause_seconds=pause_seconds
    )
    return SentHints(hints, part)


def _seconds(name: str, given: str | None) -> float | None:
    if given is None:
        return None
    if given not in SECONDS:
        raise InvalidRequestError(
            f"{name} must be one of {', '.join(SECONDS)}, got {given!r:.80}; or leave it out"
        )
    return SECONDS[given]


def _of_control(name: str, control: CacheControl | None) -> float | None:
    return None if control is None else _seconds(f"{name}.ttl", control.ttl)


def _breakpoint(fields: Fields) -> tuple[float, float | None]:
    """Returns which part of the prompt's text ends with the last block that has `cache_control`,
    and the longest retention of such blocks."""
    present = [name for name in _PROMPT if name in fields.names]
    if not any(_MARK in memoryview(fields.raw(name)).tobytes() for name in present):
        return 1.0, None
    found = _Breakpoint()
    for name in present:
        found.walk(name, fields.read(name, ANYTHING), 0)
    return found.part, found.seconds


class _Breakpoint:
    def __init__(self) -> None:
        self._characters = self._at = 0
        self.seconds: float | None = None

    @property
    def part(self) -> float:
        return self._at / self._characters if self._at else 1.0

    def walk(self, path: str, value: object, depth: int) -> None:
        if isinstance(value, str):
            self._characters += len(value)
        elif depth < _MOST_DEPTH and isinstance(value, list):
            for at, one in enumerate(value):
                self.walk(f"{path}[{at}]", one, depth + 1)
        elif depth < _MOST_DEPTH and isinstance(value, dict):
            for name, one in value.items():
                if name in ("source", "image_url"):
                    self._characters += _IMAGE_CHARACTERS
                elif name != "cache_control":
                    self.walk(f"{path}.{name}", one, depth + 1)
            if control := value.get("cache_control"):
                self._mark(f"{path}.cache_control", control)

    def _mark(self, path: str, control: object) -> None:
        ttl = control.get("ttl", CacheControl().ttl) if isinstance(control, dict) else control
        if not isinstance(ttl, str):
            raise InvalidRequestError(
                f'{path} must be an object such as {{"type": "ephemeral", "ttl": "5m"}}'
            )
        seconds = _seconds(f"{path}.ttl", ttl)
        self.seconds = max(filter(None, (self.seconds, seconds)))
        self._at = self._characters
