"""Random ids, which processes assign without coordination."""

import secrets


def random_id() -> int:
    """Returns a random 63-bit id for a reservation, hand-off, offer or process."""
    return secrets.randbits(63)
