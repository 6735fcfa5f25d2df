"""Requests of many kinds at once."""

from jdisagg.request import Request
from tests.fakes.cluster import Cluster, toy_request


def mixed_requests(count: int, max_tokens: int = 24) -> list[Request]:
    return [
        toy_request(
            number,
            prompt_tokens=1 + (number * 7) % 23,
            stop_ids=(number % 97, 11),
            max_tokens=max_tokens,
            temperature=float(number % 2),
            seed=number,
            n=1 + (number % 4 == 3),
            repetition_penalty=1.0 + 0.1 * (number % 3 == 0),
            presence_penalty=0.5 * (number % 5 == 0),
            min_tokens=number % 4,
            prompt_logprobs=(None, 0, 2)[number % 3],
        )
        for number in range(count)
    ]


async def stream_all(cluster: Cluster, requests: list[Request]) -> int:
    """Streams all at once, checks each against the oracle, and returns how many preemptions there
    were."""
    await cluster.collect_all(requests)
    await cluster.check_quiet()
    return (await cluster.decode.status()).preemptions
