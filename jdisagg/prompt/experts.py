"""The experts that a model with mixtures of experts chose for the tokens of a sequence.

Workers store them beside the KV of each position (`KVSpec.recording`), so that they move, stay
cached and are dropped with it. A reply has them with the log-probabilities of its tokens."""

import base64
from collections.abc import Iterable
from typing import TYPE_CHECKING

from jdisagg.errors import InvalidRequestError
from jdisagg.plain import Message

if TYPE_CHECKING:
    from jdisagg.request import Request
    from jdisagg.scheduler.executor import MeshLimits

MAX_EXPERTS_BYTES = 16 << 20  # of a request, so that they fit a message


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


def check_experts(worker: str, limits: "MeshLimits", request: "Request") -> None:
    """Raises InvalidRequestError if a request asks for the experts of its tokens, and a worker with
    these limits does not record them, or they do not fit a message."""
    spec, positions = limits.kv_spec, len(request.prompt_token_ids)
    if not request.sampling.return_routed_experts:
        return
    if not spec.records:
        raise InvalidRequestError(
            f"return_routed_experts: worker {worker!r} does not record the experts of tokens; start"
            " all workers with --routed_experts, or omit it"
            if spec.choices
            else f"return_routed_experts: the model of worker {worker!r} has no experts; omit it"
        )
    positions += request.most_tokens(limits.context_tokens)
    nbytes = request.sampling.n * positions * sum(2 * chosen for chosen, _ in spec.choices)
    if nbytes > MAX_EXPERTS_BYTES:
        raise InvalidRequestError(
            f"return_routed_experts: the experts of prompt and answers take up to {nbytes} bytes"
            f" ({positions} positions each), and at most {MAX_EXPERTS_BYTES} fit a reply; send a"
            " shorter prompt, or lower max_tokens or n"
        )
