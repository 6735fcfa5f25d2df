"""How long one of a worker's threads keeps the interpreter from the others.

A worker's event loop, its mesh's two threads and its channel's two hand small jobs to each other,
and each hand-over may wait for the interpreter's lock: by default up to 5 ms for a thread that does
not block, as long as 16 MB of KV take. At half a millisecond a hand-off between processes is
quicker, and nothing measured is slower (benchmarks/LOG.md)."""

import sys

SWITCH_SECONDS = 5e-4


def hand_over_quickly() -> None:
    """Affects the whole process; call it once at start."""
    sys.setswitchinterval(SWITCH_SECONDS)
