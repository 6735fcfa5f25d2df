"""Supported quantization configs of published models are read, others are refused."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from jdisagg.errors import CheckpointError
from models.checkpoint import load_config
from models.hf_config import HfConfig
from models.inspection import inspect
from models.quantization_config import stored_quantization
from tests.models.configs import not_refused
from tests.models.quantized_fixtures import AUTO_ROUND, GOLDEN, GPTQ, state, stated

PUBLISHED = Path(__file__).parent / "quantization_of_published.json"
BLOCKS = {
    "deepseek-ai/DeepSeek-V3.1": ((128, 128), (1, 0), (0, 0)),
    "MiniMaxAI/MiniMax-M2": ((128, 128), (1, 0), (0, 0)),
    "moonshotai/Kimi-K2-Thinking": ((1, 32), (1, 0), (0, 0)),
    "Qwen/Qwen3-8B-AWQ": ((1, 128),),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": ((1, 128),),
}


def test_what_is_published_is_read_in_the_blocks_that_it_states() -> None:
    found = {
        model: stored_quantization(HfConfig({"quantization_config": quantization}))
        for model, quantization in json.loads(PUBLISHED.read_text()).items()
    }
    assert {model: form.blocks for model, form in found.items() if form} == BLOCKS


@pytest.mark.parametrize("structure", [[12, 20], "12x20"])
def test_blocks_of_compressed_tensors_are_a_list_or_a_text(structure: object) -> None:
    quantization = stated(
        "float-quantized", type="float", num_bits=8, strategy="block", block_structure=structure
    )
    found = stored_quantization(HfConfig({"quantization_config": quantization}))
    assert found is not None and found.blocks[0] == (12, 20)


NOT_READ: list[tuple[object, str]] = [
    ({"quant_method": "bitsandbytes"}, "quant_method must be one of fp8, fbgemm_fp8, compre"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt must be one of e4m3, .*, got 'e5m2'"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version must be one of gemm"),
    (GPTQ | {"bits": 3}, "bits must be one of 2, 4, 8, got 3"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format must be one of gptq"),
    (GPTQ | {"dynamic": {"-:.*": {}}}, r"dynamic \(layers of other bits\) is not supported"),
    (GPTQ | {"group_size": 0}, "group_size must be a positive integer or -1, got 0"),
    (stated("marlin-24"), "format must be one of naive-quantized"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo must be one of FP8"),
    (AUTO_ROUND | {"packing_format": "auto_round:fp8"}, "packing_format must be one of"),
    (AUTO_ROUND | {"extra_config": {"x": {"bits": 8}}}, "x.bits must be one of 4, 16, 32"),
    (stated("pack-quantized", num_bits=3), r"g\.weights\.num_bits must be one of 2, 4, 8"),
    (
        stated("float-quantized", type="float", num_bits=8, strategy="tensor_group"),
        "strategy must be one of tensor, channel, group, block",
    ),
    (stated("dense") | {"transform_config": {"x": 1}}, "rotated weights"),
    ({"quant_method": "compressed-tensors"}, "config_groups must be an object, got None"),
    ("int4", "quantization_config must be an object, got 'int4'"),
]


def test_what_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(GOLDEN / "llama_tied", path)

    def read(quantization: Any) -> None:
        state(path, quantization)
        (one,) = inspect(path).missing
        with pytest.raises(CheckpointError, match=re.escape(one)):
            load_config(path)
        raise CheckpointError(one)

    assert not_refused(read, ((said, quantization) for quantization, said in NOT_READ)) == []
