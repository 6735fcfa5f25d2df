"""The shipped mixture of experts on any CPU: prefill TP=4 + EP=4, decode DP=4 + EP=4, on eight
virtual devices.

    jdisagg serve --config=configs/tiny_moe_cpu.py
    jdisagg ask --target=localhost:8700 --prompt="Once upon a time"

The shape of the large deployments in small: attention tensor parallel where prompts are computed,
data parallel where tokens are generated, whole experts spread over all devices on both sides.
Hardware: a CPU, 2 GiB of memory."""

from dataclasses import replace
from pathlib import Path

from jdisagg.config import EngineConfig, InstanceConfig, ModelConfig
from jdisagg.layout.axes import Layout

_MODEL = Path(__file__).resolve().parent.parent / "models" / "tiny" / "qwen3_moe"


def get_config() -> EngineConfig:
    sizes = InstanceConfig(page_size=128, slots_per_rank=8, chunk_tokens=128, min_chunk_tokens=128)
    return EngineConfig(
        model=ModelConfig(str(_MODEL)),
        prefill=replace(sizes, layout=Layout(dp=1, tp=4, ep=4)),
        decode=replace(sizes, layout=Layout(dp=4, tp=1, ep=4)),
    )
