"""Names of tool calls: finds the tool that a model means by the name that it wrote."""

import re
from collections.abc import Collection, Iterator

# What models write around the names of tools, such as functions.NAME:0 or functions_NAME_1.
_BEFORE = re.compile(r"(?:functions?|tools?|default_api|namespace)[._:/-]+")
_BEHIND = re.compile(r"[._:#/-]+\d+$")


def resolved(name: str, tools: Collection[str]) -> str:
    """Returns the tool of `tools` that a model means by `name`, or "" if there is none. If `tools`
    is empty, every name counts as the name of a tool."""
    if not tools:
        return name
    return next((one for one in _variants(name) if one in tools), "")


def _variants(name: str) -> Iterator[str]:
    """Yields the name itself, and the name without a trailing number or a leading word."""
    while True:
        yield name
        yield _BEHIND.sub("", name)
        before = _BEFORE.match(name)
        if before is None:
            return
        name = name[before.end() :]
