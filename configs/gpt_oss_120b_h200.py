"""gpt-oss-120b with matrices in fp8, on one host with four H200: prefill TP=2 + EP=2, decode DP=2 +
EP=2.

    jdisagg serve --config=configs/gpt_oss_120b_h200.py --model=DIR

NOT TESTED on such hardware: layouts and sizes follow from arithmetic
(tests/engine/test_memory_plan.py checks it), not from a run. The 117 GB of matrices, dequantized
from mxfp4, take 59 GB per device. KV takes 73,728 bytes per token (2 x 36 layers x 8 kv heads x 64
x 2). Decode workers hold only the half of the full-attention layers, and three pages per sequence
in layers with a window of 128."""

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
    model = ModelConfig(dtype="bfloat16", weights="fp8", context_tokens=131072)
    return EngineConfig(model=model, prefill=prefill, decode=decode)
