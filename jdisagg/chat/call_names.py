"""Finds the tool that a model means by the name in its tool call."""

import re
from collections.abc import Collection, Iterator

# Text that models add to the names of tools, such as functions.NAME:0 or functions_NAME_1.
_BEFORE = re.compile(r"(?:functions?|tools?|default_api|namespace)[._:/-]+")
_BEHIND = re.compile(r"[._:#/-]+\d+$")


def resolved(name: str, tools: Collection[str]) -> str:
    """Returns the name in `tools` that a model means by `name`, or "" if there is no such tool. If
    `tools` is empty, returns `name`."""
    if not tools:
        return name
    return next((one for one in _variants(name) if one in tools), "")


def _variants(name: str) -> Iterator[str]:
    while True:
        yield name
        yield _BEHIND.sub("", name)
        before = _BEFORE.match(name)
        if before is None:
            return
        name = name[before.end() :]
