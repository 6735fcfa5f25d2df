"""What a client states about a request beside its prompt, for the prefix cache and the router."""

from jdisagg.errors import InvalidRequestError
from jdisagg.plain import plain

MAX_RETENTION_WEIGHT = 64.0
MAX_RETENTION_SECONDS = 86_400.0
MAX_PAUSE_SECONDS = 86_400.0
MOST_TOKENS = 2**31 - 1


def _check(name: str, value: float, most: float) -> None:
    if not 0 <= value <= most:
        raise InvalidRequestError(f"{name} must be in [0, {most}], got {value!r}")


@plain
class Retention:
    """How long the cached KV of a prompt outlasts KV that was used as recently
    (`scheduler/retention.py`). A weight: it delays eviction and never prevents it.

    Attributes:
        weight: Number by which the remaining seconds count.
        seconds: Seconds after the last use when the retention ends.
    """

    weight: float
    seconds: float

    def __post_init__(self) -> None:
        _check("weight of a retention", self.weight, MAX_RETENTION_WEIGHT)
        _check("seconds of a retention", self.seconds, MAX_RETENTION_SECONDS)


@plain
class Hints:
    """What a client knows about its request. Hints change no token of the answer.

    Attributes:
        session: Key of a conversation; empty if the request belongs to none. Keys of two tenants
            never mean the same conversation.
        retention: Retention of the request's KV, or None.
        retained_tokens: Number of leading tokens of the prompt that are retained; 0 if all of the
            prompt and the answer are.
        answer_tokens: Expected length of the answer; 0 if unknown.
        pause_seconds: Expected time between the answer and the session's next turn, such as that
            of a tool; 0 if no pause is expected.
    """

    session: str = ""
    retention: Retention | None = None
    retained_tokens: int = 0
    answer_tokens: int = 0
    pause_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("retained_tokens", "answer_tokens"):
            _check(name, getattr(self, name), MOST_TOKENS)
        _check("pause_seconds", self.pause_seconds, MAX_PAUSE_SECONDS)
