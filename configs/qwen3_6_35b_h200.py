"""Qwen3.6-35B-A3B in bfloat16 on one host with four H200: prefill TP=2 + EP=2, decode DP=2 + EP=2.

    jdisagg serve --config=configs/qwen3_6_35b_h200.py --model=DIR

NOT TESTED on such hardware: layouts and sizes follow from arithmetic
(tests/engine/test_memory_plan.py checks it), not from a run. The 69 GB of weights take 35 GB per
device. KV takes 20,480 bytes per token (2 x 10 layers x 2 kv heads x 256 x 2); the other 30 layers
hold a state of 64 MB per sequence, so that slots, not pages, fill a decode device: 128 slots and a
quarter more for arriving sequences take 10 GB."""

from jdisagg.config import EngineConfig, InstanceConfig, ModelConfig
from jdisagg.layout.axes import Layout


def get_config() -> EngineConfig:
    prefill = InstanceConfig(
        layout=Layout(dp=1, tp=2, ep=2),
        page_size=64,
        slots_per_rank=16,
        chunk_tokens=8192,
        min_chunk_tokens=1024,
    )
    decode = InstanceConfig(
        layout=Layout(dp=2, tp=1, ep=2),
        page_size=64,
        slots_per_rank=128,
        chunk_tokens=8192,
        steps_per_dispatch=4,
    )
    model = ModelConfig(dtype="bfloat16", context_tokens=131072)
    return EngineConfig(model=model, prefill=prefill, decode=decode)
