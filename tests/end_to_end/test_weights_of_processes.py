"""Other weights for a cluster of processes: from a trainer, with a worker that dies and comes
back."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from jdisagg.client import Administration, AsyncClient
from jdisagg.errors import JdisaggError
from models.tokenizer import Tokenizer
from tests import time_scale
from tests.end_to_end.clusters import dense_greedy
from tests.end_to_end.other_weights import flip, perturbed, with_sums
from tests.end_to_end.process_clusters import PROMPT, cluster
from tests.end_to_end.trainer import trainer
from tests.shapes import LLAMA

TOKENS, LONG = 8, 400


async def ask(client: AsyncClient) -> list[int]:
    done = await client.complete(PROMPT, max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    return list(done.choices[0].token_ids)


async def until(client: AsyncClient, condition: Callable[[list[str]], bool]) -> None:
    """Waits until the weights of the registered workers fulfil a condition."""
    async with asyncio.timeout(time_scale.seconds(90.0)):
        while not condition([status.weights for status in await client.status()]):
            await asyncio.sleep(0.05)


@pytest.mark.ci
def test_a_cluster_takes_weights_sleeps_and_gives_them_to_a_worker_that_died(
    tmp_path: Path,
) -> None:
    others = [with_sums(perturbed(tmp_path / f"w{seed}", LLAMA, seed)) for seed in (1, 2)]
    bad = with_sums(perturbed(tmp_path / "bad", LLAMA, 3))
    flip(bad / "model.safetensors")
    prompt = Tokenizer.from_directory(LLAMA).encode(PROMPT)
    answers = [dense_greedy(folder, prompt, TOKENS) for folder in (LLAMA, *others)]

    async def check(target: str, admin: Administration, kill) -> None:
        async with AsyncClient(target) as client:
            assert await ask(client) == answers[0]
            with trainer() as source:
                name = source.offer(others[0], "mixed")
                report = await asyncio.to_thread(admin.update_weights, name, version="one")
            assert report.weights.startswith("one@") and len(report.workers) == 3
            for _ in range(3):
                assert await ask(client) == answers[1]
            with pytest.raises(JdisaggError, match="SHA-256"):
                await asyncio.to_thread(admin.update_weights, str(bad), version="bad")
            assert await ask(client) == answers[1]
            kill()  # the trainer has gone, too: another worker has the weights
            await until(client, lambda found: found != [report.weights] * 3)
            await until(client, lambda found: found == [report.weights] * 3)
            assert await ask(client) == answers[1]
            asleep = await asyncio.to_thread(admin.sleep)
            assert list(asleep.values()) == [True] * 3
            waiting = asyncio.create_task(ask(client))
            report = await asyncio.to_thread(admin.update_weights, str(others[1]), version="two")
            assert not waiting.done(), "a request waits for workers that are awake"
            assert not any((await asyncio.to_thread(admin.wake)).values())
            assert await waiting == answers[2]
            assert len({answer[-1] for answer in map(tuple, answers)} | {0}) > 1

    flags = ("--prefill_workers=1", "--decode_workers=2", f"--model={LLAMA}", "--http_port=0")
    with cluster(tmp_path, *flags) as running:

        def kill() -> None:
            worker = running.worker("decode-0")
            assert worker is not None
            worker.kill()

        asyncio.run(check(running.address, Administration(running.urls[0]), kill))
        assert running.end() == 0, running.log.read_text()
