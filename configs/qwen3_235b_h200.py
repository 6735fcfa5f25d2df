"""Qwen3-235B-A22B in bfloat16: prefill TP=4 + EP=4, decode DP=4, TP=4 + EP=16, on 20 H200 of one
NVLink domain.

    jdisagg serve --config=configs/qwen3_235b_h200.py --model=DIR

NOT TESTED on such hardware: it needs 20 devices in one process, which few hosts have, and shows the
layouts that the design targets. The 470 GB of weights take 118 GB per device on 4 devices, so a
prefill H200 (141 GB) has room for few pages. On 16 devices, experts take 29 GB per device in
addition to replicated attention. KV takes 192,512 bytes per token (2 x 94 layers x 4 kv heads x 128
x 2); tp = 4 splits the 4 kv heads, so that each device of a rank holds a quarter."""

from jdisagg.config import EngineConfig, InstanceConfig, ModelConfig
from jdisagg.layout.axes import Layout


def get_config() -> EngineConfig:
    prefill = InstanceConfig(
        layout=Layout(dp=1, tp=4, ep=4),
        page_size=64,
        pages_per_rank=512,
        slots_per_rank=16,
        chunk_tokens=4096,
        min_chunk_tokens=1024,
    )
    decode = InstanceConfig(
        layout=Layout(dp=4, tp=4, ep=16),
        page_size=64,
        pages_per_rank=12000,
        slots_per_rank=128,
        chunk_tokens=4096,
        steps_per_dispatch=4,
    )
    return EngineConfig(
        model=ModelConfig(dtype="bfloat16", context_tokens=16384), prefill=prefill, decode=decode
    )
