"""Predicts the time of KV transfers between each pair of workers. A transfer uses the fastest link
that connects the two workers' places, with as many lanes as the workers' tensor parallelism allows.

The costs depend only on the workers' descriptions and on links that they measured. Matrices are
[prefill workers, decode workers]."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jdisagg.costs.hardware import Link
from jdisagg.costs.speeds import Array, Speed

Indices = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, eq=False)
class LinkSide:
    """All workers that send KV, or all that receive it.

    Attributes:
        places: Codes of the parts (rack, host, domain, process) of each worker's place, as an array
            [parts, workers]; 0 for unknown parts.
    """

    places: Array
    speeds: Indices
    names: tuple[str, ...] = ()


# Measured links by receiver and sender: latency in seconds, and seconds per byte.
MeasuredLinks = Mapping[str, Mapping[str, tuple[float, float]]]


class LinkCosts:
    """Predicts the times of KV transfers from the workers `prefill` to the workers `decode`.

    Args:
        measured: Links that the receivers measured. They replace the links that follow from the
            workers' places. If a link was measured in one direction only, the measurement is used
            for both directions.
    """

    def __init__(
        self,
        prefill: LinkSide,
        decode: LinkSide,
        speeds: Sequence[Speed],
        far: Link,
        measured: MeasuredLinks | None = None,
    ) -> None:
        self._prefill, self._decode, self._measured = prefill, decode, measured or {}
        self._links = [_links(speed, far) for speed in speeds]
        # A sequence is sharded over the tensor-parallel devices of a rank. Each sends its part.
        tp = np.array([float(speed.kind.layout.tp) for speed in speeds])
        self._from_lanes, self._to_lanes = tp[prefill.speeds], tp[decode.speeds]
        self._wire_bytes = np.array([speed.wire_bytes_per_token for speed in speeds])[
            prefill.speeds
        ]
        shape = (len(prefill.speeds), len(decode.speeds))
        self._known, self._unknown = np.zeros(shape[0], bool), shape[0]
        # latency, lanes, seconds per byte
        self._terms = np.empty((3, *shape))
        self._alike: tuple[float, float, float] | None = None  # terms common to all pairs, or None

    def seconds(self, prefills: Indices, decodes: Indices | slice, missing: Array | float) -> Array:
        """Returns the seconds to transfer the KV of `missing` tokens between the workers at the
        indices `prefills` and `decodes`, as an array [prefills, decodes]. `missing` is one number
        or one per decode worker."""
        if self._alike is not None and isinstance(missing, float) and isinstance(decodes, slice):
            latency, lanes, per_byte = self._alike
            each = latency + float(self._wire_bytes[0]) * missing / lanes * per_byte
            return np.full((len(prefills), self._terms.shape[2]), each)
        if self._unknown:
            new = prefills[~self._known.take(prefills)]
            if len(new):
                self._find(new)
        size_bytes = self._wire_bytes.take(prefills)[:, None] * missing
        latency, lanes, per_byte = self._terms.take(prefills, axis=1)[:, :, decodes]
        return latency + size_bytes / lanes * per_byte

    def _find(self, prefills: Indices) -> None:
        closeness = np.zeros((len(prefills), len(self._decode.speeds)), np.intp)
        for ours, theirs in zip(
            self._prefill.places[:, prefills], self._decode.places, strict=True
        ):
            closeness += (ours[:, None] == theirs) & (ours != 0)[:, None]
        for at, near in zip(prefills, closeness, strict=True):
            latency, per_byte = self._links[self._prefill.speeds[at]]
            self._terms[0, at], self._terms[2, at] = latency[near], per_byte[near]
        lanes = np.minimum(self._from_lanes[prefills][:, None], self._to_lanes)
        self._terms[1, prefills] = lanes
        if self._measured:
            self._apply_measured(prefills)
        self._known[prefills] = True
        self._unknown -= len(prefills)
        if not self._unknown and (self._wire_bytes == self._wire_bytes[0]).all():
            first = self._terms[:, :1, :1]
            if (self._terms == first).all():
                latency, lanes, per_byte = first.ravel().tolist()
                self._alike = latency, lanes, per_byte

    def _apply_measured(self, prefills: Indices) -> None:
        """A measured link counts as one lane, because the time of a whole block was measured."""
        for at in prefills:
            ours = self._prefill.names[at]
            back = self._measured.get(ours, {})
            for to, theirs in enumerate(self._decode.names):
                found = self._measured.get(theirs, {}).get(ours) or back.get(theirs)
                if found is not None:
                    self._terms[:, at, to] = found[0], 1.0, found[1]


# Assumed link between workers in one rack or on one host, while no transfer between them was
# measured.
ASSUMED = Link("assumed", 1e9, 1e-3, 1.0)


@functools.lru_cache(maxsize=1024)
def _links(speed: Speed, far: Link) -> tuple[Array, Array]:
    hardware = speed.kind.hardware
    links = (
        (far, hardware.scale_out, hardware.host, hardware.scale_up, hardware.scale_up)
        if hardware
        else (far, *(ASSUMED,) * 4)
    )
    return np.array([link.latency_seconds for link in links]), np.array(
        [1.0 / (link.bytes_per_second * link.efficiency) for link in links]
    )
