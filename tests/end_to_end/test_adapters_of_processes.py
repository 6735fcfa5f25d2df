"""LoRA adapters in a cluster of processes: instances of two processes, mixed requests through a
router, a load while serving, and a decode worker that was killed."""

import asyncio
from pathlib import Path

import pytest

from jdisagg.client import Administration, AsyncClient
from jdisagg.errors import InvalidRequestError
from models.tokenizer import Tokenizer
from tests.end_to_end.adapters import merged, write_adapter
from tests.end_to_end.clusters import dense_greedy
from tests.end_to_end.process_clusters import PROMPT, cluster
from tests.shapes import LLAMA

TOKENS = 8


@pytest.mark.slow
def test_instances_of_two_processes_serve_the_model_and_adapters_and_load_them_again_after_a_death(
    tmp_path: Path,
) -> None:
    folders = [write_adapter(tmp_path / f"a{seed}", LLAMA, seed) for seed in (1, 2)]
    checkpoints = [LLAMA, *(merged(tmp_path / f"m-{one.name}", LLAMA, one) for one in folders)]
    prompt = Tokenizer.from_directory(LLAMA).encode(PROMPT)
    answers = [dense_greedy(checkpoint, prompt, TOKENS) for checkpoint in checkpoints]
    assert len({tuple(answer) for answer in answers}) == 3

    async def ask(client: AsyncClient, models: list[str]) -> list[list[int]]:
        done = await asyncio.gather(
            *(
                client.complete(
                    PROMPT, model=model, max_tokens=TOKENS, temperature=0.0, ignore_eos=True
                )
                for model in models
            )
        )
        return [list(one.choices[0].token_ids) for one in done]

    async def check(target: str, admin: Administration, kill) -> None:
        async with AsyncClient(target) as client:
            await asyncio.to_thread(admin.load_adapter, "second", str(folders[1]))
            models = ["", "first", "second"] * 2
            assert await ask(client, models) == answers * 2
            statuses = await client.status()
            assert all(len(status.adapters) == 2 for status in statuses)
            kill()
            assert await ask(client, models) == answers * 2
            running = client.generate(
                PROMPT, model="first", max_tokens=200, temperature=0.0, ignore_eos=True
            )
            tokens = list((await anext(running)).token_ids)
            await asyncio.to_thread(admin.unload_adapter, "first")
            async for event in running:
                tokens += event.token_ids
            assert tokens[:TOKENS] == answers[1] and len(tokens) == 200
            with pytest.raises(InvalidRequestError, match="'first'"):
                await ask(client, ["first"])

    flags = ("--prefill=tp=2", "--decode=tp=2", "--processes_per_instance=2", "--http_port=0")
    adapters = ("--adapters=2", "--adapter_rank=4", f"--lora_modules=first={folders[0]}")
    with cluster(
        tmp_path, "--prefill_workers=1", "--decode_workers=1", *flags, *adapters, f"--model={LLAMA}"
    ) as running:

        def kill() -> None:
            worker = running.worker("decode-0.0")
            assert worker is not None
            worker.kill()

        asyncio.run(check(running.address, Administration(running.urls[0]), kill))
        assert running.end() == 0, running.log.read_text()
