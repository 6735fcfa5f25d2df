"""Log-probabilities of prompts over the real engine, through gRPC and HTTP: those of a dense pass
over the prompt."""

import numpy as np
import pytest

from jdisagg.config import ServiceConfig
from tests.end_to_end.doors import served
from tests.executor.prompts import NEAR, TOP, check_prompt, dense
from tests.service.doors import FakePath
from tests.service.http_doors import HttpDoor
from tests.shapes import LLAMA, config

TEXT = "Once upon a time there was a little girl who lived in a house by the sea. " * 4


def wanted(ids: tuple[int, ...]) -> list[float]:
    of_all_TV = np.asarray(dense(LLAMA)(np.pad(np.array(ids, np.int32), (0, 128 - len(ids)))))
    return [float(of_all_TV[at, after]) for at, after in enumerate(ids[1:])]


@pytest.mark.ci
async def test_both_doors_tell_what_a_dense_pass_gives() -> None:
    """Twice: the second time both meshes know the prompt."""
    async with served(config(), ServiceConfig(port=0, http_port=0, drain_seconds=5.0)) as door:
        ids = await door.client.tokenize(TEXT)
        assert 64 < len(ids) < 128, "of two chunks"
        for n in (1, 2):
            said = await door.client.complete(
                token_ids=ids, max_tokens=3, prompt_logprobs=TOP, n=n, temperature=0
            )
            assert said.prompt_logprobs is not None
            check_prompt(LLAMA, tuple(ids), said.prompt_logprobs)
        plain = await door.client.complete(token_ids=ids, max_tokens=3, temperature=0)
        assert plain.prompt_logprobs is None
        assert plain.choices[0].token_ids == said.choices[0].token_ids
        asked = {"prompt": [list(ids), list(ids[:9])], "echo": True, "logprobs": 1, "max_tokens": 1}
        answer = await HttpDoor(FakePath(), door.server).ask("/v1/completions", asked)
        for one, prompt in zip(answer.fields["choices"], (ids, ids[:9]), strict=True):
            first, *others = one["logprobs"]["token_logprobs"]
            assert first is None and len(others) == len(prompt)
            np.testing.assert_allclose(others[:-1], wanted(tuple(prompt)), atol=NEAR)
