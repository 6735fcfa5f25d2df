"""config.json of published models with all their fields (published/), and tables of what is refused
by name."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from jdisagg.errors import CheckpointError

PUBLISHED = Path(__file__).parent / "published"
Fields = dict[str, object]
T = TypeVar("T")


def published(name: str) -> Fields:
    return json.loads((PUBLISHED / f"{name}.json").read_text())


def text_part(name: str, **changed: object) -> Fields:
    """A published config with other fields in its text part."""
    fields = published(name)
    text = fields["text_config"]
    assert isinstance(text, dict)
    return fields | {"text_config": text | changed}


def not_refused(
    read: Callable[[T], object],
    rows: Iterable[tuple[str, T]],
    error: type[Exception] = CheckpointError,
) -> list[str]:
    """Reads what must be refused with a message that matches, and returns the rows that were not.
    A test asserts that there are none, and so names all of them at once."""
    found = []
    for match, given in rows:
        try:
            read(given)
        except error as refusal:
            if not re.search(match, str(refusal)):
                found.append(f"{match!r} is not in {str(refusal)!r}, for {str(given)[:500]}")
        else:
            found.append(f"{match!r}: accepted {str(given)[:500]}")
    return found
