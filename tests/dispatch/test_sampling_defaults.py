"""Options that a request leaves unset are the model's own, where its generation_config.json has
wishes."""

from dataclasses import replace

from jdisagg.request import SamplingDefaults
from tests.service.doors import MODEL, FakePath, make_frontend

WISHES = SamplingDefaults(max_tokens=300, temperature=0.6, top_k=20, repetition_penalty=1.1)


async def test_the_models_own_wishes_hold_where_a_request_says_nothing() -> None:
    frontend = make_frontend(FakePath(), replace(MODEL, sampling=WISHES))
    silent = (await frontend.build_request("x")).sampling
    assert (silent.temperature, silent.top_k, silent.top_p) == (0.6, 20, 1.0)
    assert (silent.repetition_penalty, silent.max_tokens) == (1.1, 300)
    room = MODEL.context_tokens - 400
    assert (await frontend.build_request("x" * 400)).sampling.max_tokens == min(300, room)


async def test_what_a_request_says_comes_before_the_models_wishes() -> None:
    frontend = make_frontend(FakePath(), replace(MODEL, sampling=WISHES))
    said = await frontend.build_request(
        "x", temperature=0.0, top_k=0, repetition_penalty=1.0, max_tokens=3
    )
    sampling = said.sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.0, 0, 3)
    assert not sampling.penalised
