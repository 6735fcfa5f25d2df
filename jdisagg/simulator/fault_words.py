"""Faults as words, for flags: `kind:worker:at_seconds[:more]`. Knows the kinds, no cluster."""

from jdisagg.errors import ConfigError
from jdisagg.simulator.faults import Broken, Cancels, Death, Fault, SlowLink, Stall

FORMS = (
    "death:WORKER:AT[:BACK_AFTER], stall:..., broken:..., slow:WORKER:AT:FACTOR:SECONDS,"
    " cancels:AT:PART"
)
_ENDS = {"death": Death, "stall": Stall, "broken": Broken}


def parse_fault(text: str) -> Fault:
    """Raises ConfigError naming the text and the forms."""
    kind, *parts = text.split(":")
    try:
        if kind in _ENDS and len(parts) in (2, 3):
            return _ENDS[kind](
                parts[0], _seconds(parts[1]), _seconds(parts[2]) if len(parts) == 3 else None
            )
        if kind == "slow" and len(parts) == 4:
            return SlowLink(parts[0], _seconds(parts[1]), float(parts[2]), _seconds(parts[3]))
        if kind == "cancels" and len(parts) == 2:
            return Cancels(_seconds(parts[0]), float(parts[1]))
    except ValueError as error:
        raise ConfigError(f"fault {text!r}: {error}; the forms are {FORMS}") from error
    raise ConfigError(f"fault {text!r} is not understood; the forms are {FORMS}")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{text} is not 0 or more seconds")
    return seconds
