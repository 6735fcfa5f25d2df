"""A decode step's seconds in one go: `CostModel.decode_of(...).seconds` to the bit, without the
`Cost` of each part, since whoever simulates asks for nothing else, several times a request.

Where attention is linear in the context its rates are worked out once; layers are remembered by the
number of sequences. Models with windows or with layers that keep state, and kernels that read whole
contexts, are asked the long way. Pure."""

from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.model_geometry import LatentAttention


class DecodeSeconds:
    """Of one `CostModel`."""

    def __init__(self, model: CostModel) -> None:
        self._model = model
        self._linear = _is_linear(model)
        # by sequences: seconds bound by arithmetic, bound by memory, of communication, of exchange,
        # of starts (those of attention among them), of the host
        self._layers: dict[int, tuple[float, float, float, float, float, float]] = {}
        self._launch = model.accelerator.efficiency.launch_seconds * model.geometry.layers
        self._flops, self._size_bytes, self._over = model.attention_of_token()
        self._per_flop, self._per_byte = model.attention_per_flop, model.attention_per_byte

    def __call__(self, sequences: int, context_tokens: float, longest: float = 0.0) -> float:
        """Of a step of so many sequences, whose tokens add up to `context_tokens`; `longest` as in
        `decode_of`."""
        if not self._linear or not sequences:
            return self._model.decode_of(sequences, context_tokens, longest).seconds
        known = self._layers.get(sequences)
        if known is None:
            known = self._layers[sequences] = self._layers_of(sequences)
        # The order of the sums is that of `decode_of`.
        compute, memory, communication, exchange, overhead, host = known
        arithmetic = self._flops * context_tokens * self._per_flop
        traffic = context_tokens * self._size_bytes * self._per_byte
        if arithmetic > traffic:
            compute += arithmetic * self._over
        else:
            memory += traffic * self._over
        device = compute + memory + communication + exchange
        waited = self._launch - (device + overhead)
        return device + (overhead + ((waited if waited > 0.0 else 0.0) + host))

    def _layers_of(self, sequences: int) -> tuple[float, float, float, float, float, float]:
        cost, reached = self._model.decode_layers(sequences), self._model.accelerator.efficiency
        overhead = cost.overhead + self._over * reached.attention_seconds
        host = self._model.host_seconds(sequences)
        return cost.compute, cost.memory, cost.communication, cost.exchange, overhead, host


def _is_linear(model: CostModel) -> bool:
    attention = model.geometry.attention
    if model.geometry.linear or model.whole_contexts:
        return False
    return isinstance(attention, LatentAttention) or attention.window is None
