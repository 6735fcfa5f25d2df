"""An observed cluster that keeps KV in pages, host memory and files."""

from jdisagg.scheduler.disk_blocks import FILE_EXTRA_BYTES
from jdisagg.scheduler.host_blocks import TierRoom
from tests.observe.observed import ObservedCluster
from tests.worker.conversations import NAMES, limits
from tests.worker.tiers import BLOCK_BYTES, FAST

ROOM = TierRoom(12 * BLOCK_BYTES, 50 * (BLOCK_BYTES + FILE_EXTRA_BYTES), always=True)


def keeping() -> ObservedCluster:
    """Few pages at the prefill worker, and host memory behind them."""
    return ObservedCluster(
        decode=limits(pages=400), prefill=limits(pages=20), names=NAMES, costs=FAST, tiers=ROOM
    )
