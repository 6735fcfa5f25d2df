"""MiniMax M3 (text part) with matrices in fp8: prefill TP=8 + EP=8 on one host of eight H200,
decode DP=8 + EP=8 on another.

    jdisagg worker --role=decode --config=configs/minimax_m3_h200.py --model=DIR
        --router=HOST:PORT

NOT TESTED on such hardware: layouts and sizes follow from arithmetic
(tests/engine/test_memory_plan.py checks it), not from a run. The prefill worker is started likewise
with --role=prefill. The 426 GB of matrices take 54 GB per prefill device and, with a copy of
attention on each rank, 67 GB per decode device. KV takes 137,472 bytes per token: 4 kv heads of 128
in 60 layers, and an index key of 128 values in 57 layers. The indexer selects 16 blocks of 128
positions, so decode reads 2,048 positions of a long sequence."""

from jdisagg.config import EngineConfig, InstanceConfig, ModelConfig
from jdisagg.layout.axes import Layout


def get_config() -> EngineConfig:
    prefill = InstanceConfig(
        layout=Layout(dp=1, tp=8, ep=8),
        page_size=64,
        slots_per_rank=16,
        chunk_tokens=8192,
        min_chunk_tokens=1024,
    )
    decode = InstanceConfig(
        layout=Layout(dp=8, tp=1, ep=8),
        page_size=64,
        slots_per_rank=64,
        chunk_tokens=8192,
        steps_per_dispatch=4,
    )
    model = ModelConfig(dtype="bfloat16", weights="fp8", context_tokens=131072)
    return EngineConfig(model=model, prefill=prefill, decode=decode)
