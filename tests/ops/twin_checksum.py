"""The checksum of `jdisagg.ops.checksum`, in Python's integers."""

import numpy as np

MASK = 0xFFFFFFFF


def mix(x: int) -> int:
    x = ((x ^ x >> 16) * 0x7FEB352D) & MASK
    x = ((x ^ x >> 15) * 0x846CA68B) & MASK
    return x ^ x >> 16


def twin(
    block: np.ndarray,
    key: int,
    component: int = 0,
    head: int = 0,
    start: int = 0,
    valid: int | None = None,
) -> int:
    """The sum of a block [C, K, T, H], one row after the other, in Python's integers."""
    bits = block.view(np.dtype(f"uint{8 * block.itemsize}")).astype(object)
    words = (key & MASK, key >> 32)
    total = 0
    for lane, salt in enumerate((0x27D4EB2F, 0x165667B1)):
        seed = mix((words[lane] + mix(words[1 - lane] ^ salt)) & MASK)
        weights = np.array(
            [mix((seed + (h + 1) * 0x9E3779B1) & MASK) | 1 for h in range(block.shape[-1])], object
        )
        rows = (bits * weights).sum(axis=-1)
        part = 0
        for (c, k, t), row in np.ndenumerate(rows[:, :, :valid]):
            place = mix(
                ((seed ^ MASK) + (component + c) * 0x9E3779B1 + (head + k) * 0x85EBCA77) & MASK
            )
            part += mix((row + mix((place + (start + t) * 0xC2B2AE3D) & MASK)) & MASK)
        total |= (part & MASK) << 32 * lane
    return total
