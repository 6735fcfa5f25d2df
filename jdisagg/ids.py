"""Names that processes give to things without asking each other."""

import secrets


def random_id() -> int:
    """A fresh 63-bit number: reservations, hand-offs, offers and processes are named by these."""
    return secrets.randbits(63)
