"""Gemma 4 31B (text) in bfloat16 on one host with six H200: prefill TP=2, decode DP=2, TP=2.

    jdisagg serve --config=configs/gemma_4_31b_h200.py --model=DIR

NOT TESTED on such hardware: layouts and sizes follow from arithmetic
(tests/engine/test_memory_plan.py checks it), not from a run. The 61 GB of weights take 31 GB per
device on either side. KV takes 901,120 bytes per token, nearly all of it in the 50 layers with a
window of 1,024. A sequence of any length needs 0.9 GB there, and 81,920 bytes per token in the
other ten. So there are few slots, and each rank has two devices."""

from jdisagg.config import EngineConfig, InstanceConfig, ModelConfig
from jdisagg.layout.axes import Layout


def get_config() -> EngineConfig:
    prefill = InstanceConfig(
        layout=Layout(dp=1, tp=2),
        page_size=64,
        slots_per_rank=16,
        chunk_tokens=8192,
        min_chunk_tokens=1024,
    )
    decode = InstanceConfig(
        layout=Layout(dp=2, tp=2),
        page_size=64,
        slots_per_rank=32,
        chunk_tokens=4096,
        steps_per_dispatch=4,
    )
    model = ModelConfig(dtype="bfloat16", context_tokens=65536)
    return EngineConfig(model=model, prefill=prefill, decode=decode)
