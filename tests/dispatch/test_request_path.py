"""The life of a request, over fake meshes in virtual time, against the toy model's oracle."""

import pytest

from jdisagg.config import Mode
from tests.fakes.cluster import Cluster, toy_request
from tests.fakes.fake_executor import toy_limits

MODES = list(Mode)


@pytest.mark.parametrize("mode", MODES)
async def test_a_request_gives_the_oracles_tokens_and_leaves_nothing_behind(mode: Mode) -> None:
    async with Cluster(mode) as cluster:
        request = toy_request(1)
        await cluster.ask(request)
        await cluster.check_quiet()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("mode", MODES)
async def test_many_requests_at_once_give_each_its_own_tokens(mode: Mode, ranks: int) -> None:
    async with Cluster(
        mode, decode=toy_limits(ranks=ranks), prefill=toy_limits(ranks=ranks), steps_per_dispatch=3
    ) as cluster:
        requests = [
            toy_request(
                number,
                prompt_tokens=1 + (number * 7) % 40,
                stop_ids=(number % 97, 11),
                temperature=float(number % 2),
                seed=number,
                n=1 + number % 3,
                presence_penalty=0.5 * (number % 5 == 0),
                min_tokens=number % 4,
                prompt_logprobs=(None, 0, 2)[number % 3],
            )
            for number in range(24)
        ]
        await cluster.collect_all(requests)
        await cluster.check_quiet()


@pytest.mark.parametrize("mode", MODES)
async def test_an_answer_that_its_first_token_ends_took_as_long_to_come_as_any_other(
    mode: Mode,
) -> None:
    async with Cluster(mode) as cluster:
        whole = await cluster.collect(toy_request(1))
        empty = await cluster.collect(toy_request(1, stop_ids=(whole.tokens[0][0],)))
        assert not empty.tokens[0] and empty.timings is not None and whole.timings is not None
        assert empty.timings.ttft_seconds > 0
        assert empty.timings.ttft_seconds == pytest.approx(whole.timings.ttft_seconds)
        assert (empty.timings.tpot_seconds, empty.timings.handoff_gap_seconds) == (0, 0)
        await cluster.check_quiet()
