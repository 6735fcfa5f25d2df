"""Resolves references within a JSON document (RFC 6901 in a URL fragment), such as
`#/$defs/Point`."""

from collections.abc import Mapping
from urllib.parse import unquote


def referred(root: object, reference: object) -> object:
    here, parts = root, str(reference).split("/")
    if parts[0] != "#":
        return None
    for part in parts[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(here, Mapping):
            here = here.get(name)
        elif isinstance(here, list) and name.isdecimal() and int(name) < len(here):
            here = here[int(name)]
        else:
            return None
    return here
