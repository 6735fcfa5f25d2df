"""DeepSeek-V3, R1 or V3.1 with matrices in fp8: prefill TP=8 + EP=8 on one host of eight H200,
decode DP=16 + EP=16 on two.

    jdisagg worker --role=decode --config=configs/deepseek_v3_h200.py --model=DIR
        --router=HOST:PORT

NOT TESTED on such hardware: layouts and sizes follow from arithmetic
(tests/engine/test_memory_plan.py checks it), not from a run. The worker of two hosts is started on
each, with --num_processes, --process_id and --coordinator (docs/operations.md); the prefill worker
likewise with --role=prefill. The 671 GB of matrices take 85 GB per prefill device. A decode device
holds a sixteenth of the experts and a copy of attention, 61 GB. KV takes 70,272 bytes per token: a
latent of 512 + 64 values per layer. tp does not shard it, so decode uses data parallelism. The
next-token layer, which drafts tokens, adds 1 to 2 GB per device and 1,152 bytes per token. The
checkpoint's blocks of 128 x 128 are dequantized and requantized to e4m3, with one scale per
output."""

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
        layout=Layout(dp=16, tp=1, ep=16),
        page_size=64,
        slots_per_rank=128,
        chunk_tokens=8192,
        steps_per_dispatch=4,
    )
    model = ModelConfig(dtype="bfloat16", weights="fp8", context_tokens=32768)
    return EngineConfig(model=model, prefill=prefill, decode=decode)
