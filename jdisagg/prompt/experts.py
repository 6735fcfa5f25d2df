"""The experts that a model with mixtures of experts chose for the tokens of a sequence.

Workers store them beside the KV of each position (`KVSpec.recording`), so that they move, stay
cached and are dropped with it. A reply has them with the log-probabilities of its tokens."""

import base64
from collections.abc import Iterable

from jdisagg.plain import Message


class ChosenExperts(Message, frozen=True):
    """Numbers of the experts chosen at consecutive positions, in the order of the router's choice.

    Attributes:
        layers: Number of layers with experts.
        chosen: Number of experts per token and layer.
        data: int16, or `dtype`, little-endian [positions, layers, chosen].
    """

    layers: int
    chosen: int
    data: bytes
    dtype: str = "int16"

    @property
    def positions(self) -> int:
        return len(self.data) // self._bytes

    @property
    def _bytes(self) -> int:
        return self.layers * self.chosen * (2 if self.dtype == "int16" else 4)

    @classmethod
    def joined(cls, records: Iterable["ChosenExperts | None"]) -> "ChosenExperts | None":
        """Joins the records of an answer's tokens. That of the first token begins at the start of
        the prompt. Each other ends at the position before its token, and may begin at the start,
        too, if the answer was interrupted there. Returns None without records."""
        first, *others = [record for record in records if record is not None] or [None]
        if first is None:
            return None
        ends = [one.data[-one._bytes :] for one in others if one is not None]
        return cls(first.layers, first.chosen, b"".join([first.data, *ends]), first.dtype)

    def as_json(self) -> dict[str, object]:
        return {
            "data": base64.b64encode(self.data).decode(),
            "shape": [self.positions, self.layers, self.chosen],
            "dtype": self.dtype,
        }
