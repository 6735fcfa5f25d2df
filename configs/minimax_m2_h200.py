"""MiniMax M2 or M2.5 with matrices in fp8, on one host of eight H200: prefill TP=4 + EP=4, decode
DP=4 + EP=4.

    jdisagg serve --config=configs/minimax_m2_h200.py --model=DIR

NOT TESTED on such hardware: layouts and sizes follow from arithmetic
(tests/engine/test_memory_plan.py checks it), not from a run. The 229 GB of matrices take 58 GB per
prefill device and, with a copy of attention on each rank, 61 GB per decode device. KV takes 253,952
bytes per token (2 x 62 layers x 8 kv heads x 128 x 2). In one process KV is transferred by
device_put, peer to peer over NVLink."""

from jdisagg.config import EngineConfig, InstanceConfig, ModelConfig
from jdisagg.layout.axes import Layout


def get_config() -> EngineConfig:
    prefill = InstanceConfig(
        layout=Layout(dp=1, tp=4, ep=4),
        page_size=64,
        slots_per_rank=16,
        chunk_tokens=8192,
        min_chunk_tokens=1024,
    )
    decode = InstanceConfig(
        layout=Layout(dp=4, tp=1, ep=4),
        page_size=64,
        slots_per_rank=64,
        chunk_tokens=8192,
        steps_per_dispatch=4,
    )
    model = ModelConfig(dtype="bfloat16", weights="fp8", context_tokens=65536)
    return EngineConfig(model=model, prefill=prefill, decode=decode)
