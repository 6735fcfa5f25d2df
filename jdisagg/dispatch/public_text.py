"""Removes addresses of the cluster's processes from the text of an error that a client receives.

Errors of connections contain the address, and gRPC's texts contain IP addresses and ports. A
worker's address is replaced by the worker's name."""

import re
from collections.abc import Mapping

from jdisagg.errors import UnavailableError

_ADDRESS = re.compile(
    r"(?:ipv[46]:)?(?:\[[0-9a-fA-F:.]+\]|%5B[0-9a-fA-F:.]+%5D|[A-Za-z0-9][\w.-]*):\d{2,5}(?![\w.])"
)
_HIDDEN = "(address)"


def public(error: UnavailableError, addresses: Mapping[str, str]) -> UnavailableError:
    """Returns the error. If its text contains an address, returns a copy without it."""
    text = error.message
    for name, address in addresses.items():
        if address:
            text = text.replace(address, name)
    text = _ADDRESS.sub(_HIDDEN, text)
    if text == error.message:
        return error
    return type(error)(text, retry_after_seconds=error.retry_after_seconds)
