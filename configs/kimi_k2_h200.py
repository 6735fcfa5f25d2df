"""Kimi K2 or K2.5 (text) with matrices in fp8: prefill DP=2, TP=8 + EP=16 on two hosts of eight
H200, decode DP=16 + EP=16 on two more.

    jdisagg worker --role=decode --config=configs/kimi_k2_h200.py --model=DIR
        --router=HOST:PORT

NOT TESTED on such hardware: layouts and sizes follow from arithmetic
(tests/engine/test_memory_plan.py checks it), not from a run. Workers of two hosts are started on
each, with --num_processes, --process_id and --coordinator (docs/operations.md). The matrices take
1,026 GB. On either side, experts take 62 GB on each of sixteen devices. Attention is sharded by tp
in prefill and replicated in decode. The checkpoint's int4 in groups of 32 is requantized to e4m3
with one scale per output. --weights=int4 would need half as much memory, but rounds far more
coarsely than the checkpoint."""

from jdisagg.config import EngineConfig, InstanceConfig, ModelConfig
from jdisagg.layout.axes import Layout


def get_config() -> EngineConfig:
    prefill = InstanceConfig(
        layout=Layout(dp=2, tp=8, ep=16),
        page_size=64,
        slots_per_rank=16,
        chunk_tokens=8192,
        min_chunk_tokens=1024,
    )
    decode = InstanceConfig(
        layout=Layout(dp=16, tp=1, ep=16),
        page_size=64,
        slots_per_rank=128,
        chunk_tokens=8192,
        steps_per_dispatch=4,
    )
    model = ModelConfig(dtype="bfloat16", weights="fp8", context_tokens=65536)
    return EngineConfig(model=model, prefill=prefill, decode=decode)
