"""How the engines of `jdisagg/costs/engines.py` run a published point: precision, and what the
run's own script sets. Settings are those of the scripts that made InferenceX's runs (`setting`)."""

from dataclasses import dataclass, replace

from benchmarks.closed_loop import Batching
from benchmarks.public_points import Devices, Point
from jdisagg.costs.catalog import CATALOG
from jdisagg.costs.cost_model import CostModel
from jdisagg.costs.engines import BLACKWELL, ENGINES, GpuEngine
from jdisagg.costs.hardware import accelerator
from jdisagg.costs.model_geometry import LatentAttention
from jdisagg.layout.axes import Layout

# Seconds that the first burst of InferenceX's runs waits for beside steps, without and with latent
# attention. The mean over a run contains a part of it, whatever the number of users. Compilation is
# the likely cause.
COLD = {"trtllm": (0.0, 1.5), "sglang": (2.0, 2.0)}


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of a run's own script: chunk_tokens and poll (see `Batching`), KV in bfloat16 or 8
    bits, captured_tokens (see `Kernels`)."""

    chunk_tokens: int
    poll: int
    kv_dtype: str
    captured_tokens: int


def engine_of(point: Point) -> GpuEngine:
    engine = ENGINES[point.engine]
    assert isinstance(engine, GpuEngine)
    return engine


def setting(point: Point) -> Setting:
    """Returns the settings of InferenceX's scripts (SemiAnalysisAI/InferenceX at 843c625,
    benchmarks/single_node), with the engine's defaults for the rest."""
    blackwell, model = point.card in BLACKWELL, point.model
    chunk, poll = engine_of(point).chunk_tokens, 0
    kv_dtype = "bfloat16" if point.precision == "bf16" else "int8"
    captured = engine_of(point).captured_tokens
    if point.origin != "inferencex" or point.mode == "disagg":
        return Setting(chunk, poll, kv_dtype, captured)
    if point.engine == "sglang":
        chunk = 16384 if model.startswith("qwen3.5") or point.precision == "fp4" else 32768
        chunk = 32768 if point.precision == "bf16" or point.devices.dp > 1 else chunk
        many = point.users > 4 if model.startswith("qwen3.5") else point.users >= 16
        if blackwell and point.devices.dp <= 1:
            poll = 30 if many else 10
        if model.startswith("qwen3.5") and point.card == "b300" and point.precision == "fp8":
            poll = 10
        if model == "deepseek-v3" and point.precision == "fp8" and blackwell:
            chunk, poll = (8192, 10) if point.devices.tp == 4 else (chunk, poll)
        if model == "deepseek-v3" and not blackwell:
            kv_dtype = "bfloat16"
    if point.engine == "trtllm" and model == "gpt-oss-120b":
        chunk, kv_dtype = 20000, kv_dtype if blackwell else "bfloat16"
    if point.engine == "vllm":
        if model == "minimax-m2.5":
            chunk = 2 * point.prompt if blackwell else 32768
        if model == "gpt-oss-120b" or (model == "minimax-m2.5" and point.card == "b300"):
            captured = 2048
        if point.precision == "int4" or (model == "gpt-oss-120b" and not blackwell):
            kv_dtype = "bfloat16"
    return Setting(chunk, poll, kv_dtype, captured)


def cold_seconds(point: Point) -> float:
    """Returns the seconds by which the first burst of a run was delayed."""
    if point.origin != "inferencex":
        return 0.0
    latent = isinstance(CATALOG[point.model].attention, LatentAttention)
    return COLD.get(point.engine, (0.0, 0.0))[latent]


def batching(point: Point, kv_tokens: int, chunk_tokens: int, *, poll: int = 0) -> Batching:
    """Returns how the engine forms its steps."""
    engine = engine_of(point)
    return Batching(
        engine.order,
        chunk_tokens,
        kv_tokens,
        engine.front_seconds,
        engine.steps_ahead,
        engine.reserved,
        poll=poll,
    )


def kv_tokens(costs: CostModel) -> int:
    """Returns the KV capacity of one rank, in tokens. A tenth of the memory is kept free if
    possible."""
    return costs.kv_tokens_per_rank() or costs.kv_tokens_per_rank(0.02)


def cost_model(point: Point, devices: Devices, captured_tokens: int | None = None) -> CostModel:
    """Returns the cost model with the point's types of weights and KV. `captured_tokens`: as in
    `Kernels`, if it differs from `setting`."""
    engine, weights = engine_of(point), "" if point.precision == "bf16" else point.precision
    geometry = CATALOG[point.model]
    layout = devices.layout(experts=bool(geometry.experts))
    assert isinstance(layout, Layout), layout
    # Experts that are cut over several dp ranks have the layout of whole experts, but the kernels
    # of cut ones.
    cut = layout if devices.moe_ep > 1 else Layout(tp=layout.tp)
    card = engine.card(accelerator(point.card), geometry, cut, weights)
    if captured_tokens is None:
        captured_tokens = setting(point).captured_tokens
    return CostModel(
        engine.shape(geometry, weights),
        card,
        layout,
        kv_dtype=setting(point).kv_dtype,
        kernels=replace(card.kernels, captured_tokens=captured_tokens),
    )
