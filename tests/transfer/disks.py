"""A store of blocks on disk that is waited for, and blocks for it."""

from pathlib import Path

import ml_dtypes
import numpy as np

from jdisagg.transfer.block_file import SavedArray
from jdisagg.transfer.disk_store import DiskOutcome, DiskStore
from tests import time_scale

SPACE, OTHER_SPACE = b"n" * 32, b"m" * 32
SUMS = (7, 1 << 62)
WAIT_SECONDS = time_scale.seconds(30)


def name(number: int) -> bytes:
    return bytes([number]) * 32


def block(number: int) -> tuple[SavedArray, ...]:
    """Two pieces over two shards, one in bfloat16."""
    rng = np.random.default_rng(number)
    return tuple(
        SavedArray(
            piece,
            ((0, 1), (0, 2), (2 * shard, 2 * shard + 2), (0, 16), (0, 4)),
            rng.standard_normal((1, 2, 2, 16, 4)).astype(dtype),
        )
        for piece, dtype in enumerate((np.float32, ml_dtypes.bfloat16))
        for shard in range(2)
    )


def equal(one: tuple[SavedArray, ...], other: tuple[SavedArray, ...]) -> bool:
    return len(one) == len(other) and all(
        (a.piece, a.box, a.array.dtype, a.array.tobytes())
        == (b.piece, b.box, b.array.dtype, b.array.tobytes())
        for a, b in zip(one, other, strict=True)
    )


class Disk:
    def __init__(self, folder: Path, space: bytes = SPACE) -> None:
        self.store = DiskStore(str(folder), "test")
        self.found = self.store.find(space).result(WAIT_SECONDS)

    def write(self, number: int, index: int = 0) -> DiskOutcome:
        future = self.store.write(name(number), index, lambda: block(number), SUMS)
        return future.result(WAIT_SECONDS)

    def read(self, number: int) -> DiskOutcome:
        return self.store.read(name(number), 0).result(WAIT_SECONDS)

    def remove(self, *numbers: int) -> DiskOutcome:
        return self.store.remove([name(one) for one in numbers]).result(WAIT_SECONDS)

    def remove_all(self) -> DiskOutcome:
        return self.store.remove_all().result(WAIT_SECONDS)

    def close(self) -> None:
        self.store.close()
