"""The part of a KV transfer that does not overlap with the prefill before it."""

from typing import overload

import numpy as np

from jdisagg.costs.speeds import Array


@overload
def exposed_seconds(
    transfer: float, prefill: float, pieces: float, waited: float = 0.0
) -> float: ...


@overload
def exposed_seconds(
    transfer: Array, prefill: Array, pieces: float | Array, waited: float = 0.0
) -> Array: ...


def exposed_seconds(
    transfer: float | Array, prefill: float | Array, pieces: float | Array, waited: float = 0.0
) -> float | Array:
    """Returns the seconds of a transfer that remain after the prefill has ended.

    The KV is sent in equal pieces, each of them after it was computed. The last piece is always
    sent after the prefill. If the links are slower than the prefill, so is part of the others.

    Args:
        pieces: Number of pieces: the chunks of a prompt, or the layer groups of a chunk.
        waited: Times for which the first piece waited for links that were busy.
    """
    last = transfer / pieces
    others = transfer + waited - prefill * (1.0 - 1.0 / pieces)
    return max(last, others) if isinstance(others, float) else np.maximum(last, others)
