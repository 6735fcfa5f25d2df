"""Models of families whose parts no other test hands over: disaggregated, they give the tokens of
transformers (tests/golden)."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.clusters import LLAMA, config, running

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [
        ("glm4_moe_groups", "tp=2,ep=2", "dp=2,tp=2,ep=4"),
        ("minimax_m2", "dp=2", "tp=4,ep=4"),
        ("gpt_oss", "tp=2,ep=2", "dp=2,tp=2"),
        ("gpt_oss_mxfp4", "dp=2", "dp=2,tp=2,ep=4"),
        ("olmo3", "tp=2", "dp=2"),
        ("ministral3", "tp=1", "tp=4"),
        ("mistral4", "tp=4,ep=4", "dp=2,tp=2,ep=4"),
        ("phi3", "tp=4", "dp=2"),
        ("gemma2", "tp=2", "dp=2,tp=2"),
        ("gemma3", "tp=2", "dp=2,tp=2"),
        ("gemma3_text", "dp=2", "tp=4"),
        # more devices than kv heads that all of its layers could be cut by
        ("gemma4", "tp=4", "dp=2,tp=2"),
        pytest.param("gemma4_moe", "tp=4", "dp=2,tp=2,ep=4", marks=pytest.mark.slow),
    ],
)
async def test_a_family_gives_the_tokens_of_transformers(
    name: str, prefill: str, decode: str, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(GOLDEN / name, tmp_path / name))
    for file in ("tokenizer.json", "tokenizer_config.json"):  # any: ids go in and come out
        shutil.copy(LLAMA / file, directory / file)
    expected = np.load(directory / "expected.npz")
    sizes = config(
        prefill=prefill, decode=decode, directory=directory, context=128, slots=1, chunk=64
    )
    async with running(sizes) as run:
        prompt = [int(token) for token in expected["prompt"]]
        request = run.request(prompt, max_tokens=64, ignore_eos=True)
        done = await run.complete(request)
    assert done.tokens[0] == expected["greedy"].tolist()
