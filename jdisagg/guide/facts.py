"""Computes the part of the guide that needs no simulation: KV sizes and transfer times of prompts,
and the roofline of prefill and decode.

KV sizes are computed as in `jdisagg kv_calculator`, and seconds with the cost model. For a model
and an accelerator, one answer has all prompt lengths and links that the page offers. Has no side
effects."""

from dataclasses import replace

import msgspec
import numpy as np

from jdisagg.costs.catalog import geometry
from jdisagg.costs.cost_model import CostModel, wire_bytes_per_token
from jdisagg.costs.hardware import Accelerator, Efficiency, accelerator, link
from jdisagg.costs.kv_facts import kv_formula, link_uses, sent_part
from jdisagg.costs.model_geometry import CostGeometry, LatentAttention
from jdisagg.costs.speeds import exposed_seconds
from jdisagg.errors import InvalidRequestError
from jdisagg.simulator.planning.bounds import alone_seconds
from jdisagg.simulator.planning.candidates import WHOLE_CHUNK, Fitting, Site, fitting_layouts

# Models of the page, with the bits per value of their matrices. 0 means that they are published in
# 16 bits.
GUIDE_MODELS = {
    "llama-3.1-8b": 0,
    "qwen3-32b": 0,
    "llama-3.1-70b": 0,
    "gpt-oss-120b": 4,
    "qwen3-235b-a22b": 0,
    "deepseek-v3": 8,
}
GUIDE_HARDWARE = ("a100", "h100", "h200", "b200", "tpu-v6e")
GUIDE_LINKS = (
    "nvlink4",
    "pcie5",
    "infiniband-ndr",
    "ethernet-100g",
    "ethernet-25g",
    "ethernet-10g",
)
PROMPTS = tuple(1 << power for power in range(8, 16))  # lengths that the page's slider offers
LONGER_PROMPTS = (1 << 16, 1 << 17)  # also plotted if they fit into the model's context
DTYPE = "bfloat16"
INSTANCE_TOKENS = 1 << 15  # an instance has room for a prompt of this many tokens and its answer
MOST_DEVICES = 32
CONTEXT_TOKENS = 2048  # of each sequence in the roofline's decode steps
DECODE_BATCHES = tuple(1 << power for power in range(10))
PREFILL_TOKENS = tuple(1 << power for power in range(4, 14))
# An ideal device without fixed times. With a peak of 1 FLOP/s, predicted seconds equal the number
# of operations. With a bandwidth of 1 byte/s, they equal the number of bytes.
_IDEAL = Efficiency(1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1e30, 1)
_ENDLESS = 1e60


class FactsQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str = "llama-3.1-8b"
    hardware: str = "h100"

    def __post_init__(self) -> None:
        check_choice("model", self.model, tuple(GUIDE_MODELS))
        check_choice("hardware", self.hardware, GUIDE_HARDWARE)


class KvTransfer(msgspec.Struct, frozen=True):
    """The transfer of one prompt's KV over one link. `exposed_seconds`: part of `seconds` that does
    not overlap with the prefill."""

    link: str
    seconds: float
    exposed_seconds: float


class KvAtLength(msgspec.Struct, frozen=True):
    """The KV of one prompt of `prompt_tokens` tokens.

    Attributes:
        sent_bytes: Bytes that a hand-off transfers. They are fewer than `kv_bytes` in a model with
            windowed layers.
        prefill_seconds: Time to prefill the prompt alone on one instance.
    """

    prompt_tokens: int
    kv_bytes: int
    sent_bytes: float
    prefill_seconds: float
    links: tuple[KvTransfer, ...]


class RooflinePoint(msgspec.Struct, frozen=True):
    """One step on one device. `size`: sequences of a decode step, or tokens of a prefill.

    `intensity`: FLOP per byte of memory traffic. `flops_per_second`: FLOP divided by the predicted
    seconds of the whole step. `bound`: "memory" or "compute", whichever takes longer. `fits`:
    whether the KV of the step fits into the memory of an instance."""

    size: int
    intensity: float
    flops_per_second: float
    seconds: float
    bound: str
    fits: bool


class Roofline(msgspec.Struct, frozen=True):
    """The roofline of prefill and decode on one device. `peak_flops`, `bytes_per_second`: nominal
    speeds of the device. `context_tokens`: context of each sequence in the decode steps."""

    peak_flops: float
    bytes_per_second: float
    context_tokens: int
    prefill: tuple[RooflinePoint, ...]
    decode: tuple[RooflinePoint, ...]


class GuideFacts(msgspec.Struct, frozen=True):
    """Sizes and speeds of a model on an accelerator. `devices`, `layout`: the smallest instance
    whose KV memory has room for INSTANCE_TOKENS tokens. `formula`: text that shows how
    `kv_bytes_per_token` is computed."""

    model: str
    hardware: str
    devices: int
    layout: str
    matrix_bits: int
    parallel_links: int
    formula: str
    kv_bytes_per_token: int
    latent: bool
    window: int
    lengths: tuple[KvAtLength, ...]
    roofline: Roofline


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Checks that `value` is one of `choices`. If not, raises InvalidRequestError with the
    choices."""
    if value not in choices:
        listed = ", ".join(str(choice) for choice in choices)
        raise InvalidRequestError(f"{name} must be one of {listed}, got {str(value)[:80]!r}")


def _geometry_of(model: str) -> CostGeometry:
    return replace(geometry(model), matrix_bits=GUIDE_MODELS[model])


def smallest_instance(model: str, card: Accelerator) -> Fitting:
    """Returns the layout with the fewest devices that has room for the weights and for
    INSTANCE_TOKENS tokens. Raises NothingFits if MOST_DEVICES devices have no room."""
    site = Site(card, MOST_DEVICES)
    fitting = fitting_layouts(_geometry_of(model), site, INSTANCE_TOKENS + 1024, DTYPE)
    return min(fitting, key=lambda item: (item.layout.devices, item.layout.dp))


def facts(question: FactsQuestion) -> GuideFacts:
    """Returns the sizes and speeds of a model on an accelerator.

    Raises:
        NothingFits: The model does not fit on MOST_DEVICES accelerators.
    """
    shape, card = _geometry_of(question.model), accelerator(question.hardware)
    fitting = smallest_instance(question.model, card)
    longest = (*PROMPTS, *(tokens for tokens in LONGER_PROMPTS if tokens <= shape.context_tokens))
    layout = fitting.layout
    return GuideFacts(
        model=question.model,
        hardware=question.hardware,
        devices=layout.devices,
        layout=str(layout),
        matrix_bits=shape.matrix_bits or 16,
        parallel_links=layout.tp,
        formula=kv_formula(shape, DTYPE),
        kv_bytes_per_token=shape.kv_bytes_per_token(DTYPE),
        latent=isinstance(shape.attention, LatentAttention),
        window=shape.widest_window if shape.windowed_part else 0,
        lengths=tuple(_at_length(fitting.model, tokens) for tokens in longest),
        roofline=_roofline(fitting, card),
    )


def _at_length(model: CostModel, tokens: int) -> KvAtLength:
    wire = wire_bytes_per_token(model.geometry, model.kv_value_bytes)
    wire *= sent_part(model.geometry, tokens)
    uses = link_uses([link(name) for name in GUIDE_LINKS], model.layout.tp, wire, tokens, 0.0)
    moved = np.array([use.seconds for use in uses])
    prefill = alone_seconds(model, tokens, WHOLE_CHUNK)
    exposed = exposed_seconds(moved, np.full_like(moved, prefill), -(-tokens // WHOLE_CHUNK))
    return KvAtLength(
        tokens,
        model.geometry.kv_bytes_per_token(DTYPE) * tokens,
        wire * tokens,
        prefill,
        tuple(map(KvTransfer, GUIDE_LINKS, moved.tolist(), exposed.tolist())),
    )


def _roofline(fitting: Fitting, card: Accelerator) -> Roofline:
    model = fitting.model
    slow = replace(card, efficiency=_IDEAL)
    operations, traffic = (
        CostModel(model.geometry, counted, model.layout, dtype=DTYPE)
        for counted in (
            replace(slow, peak_flops=1.0, memory_bytes_per_second=_ENDLESS),
            replace(slow, peak_flops=_ENDLESS, memory_bytes_per_second=1.0),
        )
    )

    def point(size: int, held_tokens: int, decodes: bool) -> RooflinePoint:
        flops, size_bytes, cost = (
            one.decode_of(size, float(size * CONTEXT_TOKENS))
            if decodes
            else one.prefill([(size, 0)])
            for one in (operations, traffic, model)
        )
        return RooflinePoint(
            size,
            flops.compute / size_bytes.memory,
            flops.compute / cost.seconds,
            cost.seconds,
            "memory" if cost.memory > cost.compute else "compute",
            held_tokens <= fitting.kv_tokens,
        )

    return Roofline(
        card.peak_flops,
        card.memory_bytes_per_second,
        CONTEXT_TOKENS,
        tuple(point(tokens, tokens, False) for tokens in PREFILL_TOKENS),
        tuple(point(batch, batch * CONTEXT_TOKENS, True) for batch in DECODE_BATCHES),
    )
