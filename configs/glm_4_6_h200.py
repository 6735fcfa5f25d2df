"""GLM-4.6 with matrices in fp8: prefill TP=4 + EP=4 on four H200, decode DP=4, TP=2 + EP=8 on
eight.

    jdisagg worker --role=decode --config=configs/glm_4_6_h200.py --model=DIR
        --router=HOST:PORT

NOT TESTED on such hardware: layouts and sizes follow from arithmetic
(tests/engine/test_memory_plan.py checks it), not from a run. Prefill uses half a host
(--role=prefill --gpus=0-3), decode a whole one. The 353 GB of matrices take 89 GB per device on
four and 51 GB on eight, including each rank's copy of attention. KV takes 376,832 bytes per token
(2 x 92 layers x 8 kv heads x 128 x 2), so tp = 2 halves it on each device of a rank. The next-token
layer, which drafts tokens, adds 1 GB per device and 4,096 bytes per token."""

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
        layout=Layout(dp=4, tp=2, ep=8),
        page_size=64,
        slots_per_rank=128,
        chunk_tokens=8192,
        steps_per_dispatch=4,
    )
    model = ModelConfig(dtype="bfloat16", weights="fp8", context_tokens=65536)
    return EngineConfig(model=model, prefill=prefill, decode=decode)
