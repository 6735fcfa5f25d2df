"""Streams of prompts with images are those of transformers, whatever computes, keeps or moves them.

A prompt of the fixtures has two images, the first of which lies over a border of chunks of 16
tokens, and of blocks that are kept."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.config import Mode, PrefixConfig
from models import vision_config
from tests.end_to_end.clusters import running
from tests.end_to_end.other_weights import perturbed
from tests.end_to_end.pictures import DEEP, PIXTRAL, QWEN, asked, engine, rows
from tests.end_to_end.two_decoders import TwoDecoders
from tests.golden.images import golden_images, other_image
from tests.shapes import GOLDEN


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "mode"),
    [(QWEN, Mode.DISAGGREGATED), (PIXTRAL, Mode.CHUNKED), (DEEP, Mode.DISAGGREGATED)],
)
async def test_streams_are_those_of_transformers_and_only_the_same_image_is_a_hit(
    name: str, mode: Mode, tmp_path: Path
) -> None:
    found, images = golden_images(name)
    prompt, greedy = found["prompt"].tolist(), found["greedy"].tolist()
    other = (other_image(images[0]), images[1])
    async with running(engine(tmp_path, name, mode)) as run:
        first = await run.complete(asked(run, prompt, images, "first"))
        assert first.tokens[0] == greedy and first.usage and first.usage.cached_tokens == 0
        again = await run.complete(asked(run, prompt, images, "again"))
        assert again.tokens[0] == greedy and again.usage and again.usage.cached_tokens >= 16
        changed = await run.complete(asked(run, prompt, other, "changed"))
        assert changed.usage and changed.usage.cached_tokens == 0
        text = await run.complete(asked(run, prompt, (), "text"))
        assert text.usage and text.usage.cached_tokens == 0
        assert len({tuple(one.tokens[0]) for one in (first, changed, text)}) > 1
        cut = [row for row in rows(run) for image in row.images if image.start < row.start]
        assert cut, "no row began within an image"
    async with running(engine(tmp_path / "alone", name, mode)) as run:
        alone = await run.complete(asked(run, prompt, other))
        assert alone.tokens == changed.tokens


@pytest.mark.ci
async def test_an_image_is_encoded_once_and_text_beside_it_is_not_changed(tmp_path: Path) -> None:
    found, images = golden_images(PIXTRAL)
    prompt, greedy = found["prompt"].tolist(), found["greedy"].tolist()
    made = replace(engine(tmp_path, PIXTRAL, Mode.CHUNKED), prefix=PrefixConfig())
    async with running(made) as run:
        words = [token for token in prompt if token > 9]
        alone = await run.complete(asked(run, words, (), "words"))
        both = [
            asked(run, prompt, images, f"r{at}") if at % 2 else asked(run, words, (), f"r{at}")
            for at in range(6)
        ]
        done = await run.complete_all(both)
        encoder = run.cluster.decode.executor.images
        assert encoder is not None and encoder.encoded == len(images)
    for at, one in enumerate(done):
        assert one.tokens[0] == (greedy if at % 2 else alone.tokens[0])


@pytest.mark.ci
async def test_a_chunk_may_have_more_images_than_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision_config, "MOST_PATCHES", 32)
    monkeypatch.setattr(vision_config, "KEPT_IMAGES", 1)
    found, images = golden_images(PIXTRAL)
    async with running(engine(tmp_path, PIXTRAL, Mode.UNIFIED)) as run:
        limits = run.cluster.decode.executor.limits
        assert limits.images is not None
        assert limits.image_rows < sum(limits.images.tokens(image) for image in images)
        done = await run.complete(asked(run, found["prompt"].tolist(), images))
        assert done.tokens[0] == found["greedy"].tolist()
        assert max(len(row.images) for row in rows(run)) == 2


@pytest.mark.ci
async def test_preempted_prompts_with_images_are_computed_anew(tmp_path: Path) -> None:
    found, images = golden_images(PIXTRAL)
    prompt = found["prompt"].tolist()
    other = (other_image(images[0]), images[1])
    few = {"pages": 20, "decode_page": 8, "growth": 1}
    most = 60
    made = engine(tmp_path, PIXTRAL, Mode.CHUNKED, **few)
    async with running(made) as run:
        alone = [
            (await run.complete(asked(run, prompt, each, max_tokens=most))).tokens
            for each in (images, other)
        ]
        requests = [
            asked(run, prompt, (images, other)[at % 2], f"r{at}", max_tokens=most)
            for at in range(4)
        ]
        done, preemptions = await run.complete_preempted(requests)
    assert preemptions > 0
    assert [one.tokens for one in done] == alone * 2


@pytest.mark.ci
async def test_moved_sequences_keep_their_positions(tmp_path: Path) -> None:
    found, images = golden_images(QWEN)
    prompt = found["prompt"].tolist()
    made = engine(tmp_path, QWEN, Mode.DISAGGREGATED)
    async with running(made) as run:
        request = asked(run, prompt, images, max_tokens=100)
        expected = (await run.complete(request)).tokens
    async with running(made, kind=TwoDecoders) as run:
        cluster = run.cluster
        assert isinstance(cluster, TwoDecoders)
        moving = asyncio.create_task(cluster.move_some(both_ways=True))
        requests = [asked(run, prompt, images, f"r{at}", max_tokens=100) for at in range(3)]
        done = []
        async with asyncio.timeout(300):  # sequences end before the programs that move are compiled
            while not cluster.moved:
                done += await run.complete_all(requests)
        moving.cancel()
    assert [one.tokens for one in done] == [expected] * len(done)


@pytest.mark.ci
async def test_images_are_encoded_anew_after_an_update_of_the_weights_and_after_sleep(
    tmp_path: Path,
) -> None:
    found, images = golden_images(PIXTRAL)
    prompt, greedy = found["prompt"].tolist(), found["greedy"].tolist()
    other = perturbed(tmp_path / "other", GOLDEN / PIXTRAL, 1)
    made = engine(tmp_path, PIXTRAL, Mode.UNIFIED)
    async with running(made) as run:
        before = await run.complete(asked(run, prompt, images, "before"))
        assert before.tokens[0] == greedy
        await run.cluster.weights.update(str(other), "step-1")
        after = await run.complete(asked(run, prompt, images, "after", logprobs=2))
        await run.cluster.weights.sleep()
        await run.cluster.weights.wake()
        awake = await run.complete(asked(run, prompt, images, "awake", logprobs=2))
    assert awake.logprobs == after.logprobs
    shutil.copy(other / "model.safetensors", Path(made.model.directory) / "model.safetensors")
    async with running(made) as run:
        cold = await run.complete(asked(run, prompt, images, "cold", logprobs=2))
    assert cold.logprobs == after.logprobs and cold.tokens != before.tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", [PIXTRAL, DEEP])
async def test_nothing_is_compiled_for_images_after_warm_up(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision_config, "MOST_PATCHES", 512)
    found, images = golden_images(name)
    made = engine(tmp_path, name, Mode.UNIFIED, warm_up=True, slots=1, context=64)
    made = replace(made, prefix=PrefixConfig())
    async with running(made) as run:
        before = run.cluster.compilations
        done = await run.complete(asked(run, found["prompt"].tolist(), images))
        assert done.tokens[0] == found["greedy"].tolist()
        assert run.cluster.compilations == before
