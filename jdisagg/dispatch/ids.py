"""Random ids, which processes assign without coordination."""

import secrets


def random_id() -> int:
    return secrets.randbits(63)
