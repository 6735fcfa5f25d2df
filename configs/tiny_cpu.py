"""The shipped dense model on any CPU: prefill TP=2 on two virtual devices, decode DP=2 on two more.

    jdisagg serve --config=configs/tiny_cpu.py
    jdisagg ask --target=localhost:8700 --prompt="Once upon a time"

Hardware: a CPU, 2 GiB of memory. Virtual devices share the CPU's cores: this recipe shows
correctness, not speed."""

from dataclasses import replace
from pathlib import Path

from jdisagg.config import EngineConfig, InstanceConfig, ModelConfig
from jdisagg.layout.axes import Layout

_MODEL = Path(__file__).resolve().parent.parent / "models" / "tiny" / "llama"


def get_config() -> EngineConfig:
    sizes = InstanceConfig(page_size=128, slots_per_rank=16, chunk_tokens=128, min_chunk_tokens=128)
    return EngineConfig(
        model=ModelConfig(str(_MODEL)),
        prefill=replace(sizes, layout=Layout(dp=1, tp=2)),
        decode=replace(sizes, layout=Layout(dp=2, tp=1)),
    )
