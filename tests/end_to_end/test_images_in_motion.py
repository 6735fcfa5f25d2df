"""Prompts with images on sharded prefill meshes, from slower tiers of the prefix cache, and after
the death of the prefill worker: streams are those of transformers, and another image never hits."""

from dataclasses import replace
from pathlib import Path

import pytest

from jdisagg.config import EngineConfig, LimitsConfig, Mode, PrefixConfig
from jdisagg.dispatch.image_reader import ImageReader
from jdisagg.messages.step_commands import PrefillChunk
from jdisagg.prompt.images import PromptImage
from jdisagg.request import CachedTokens
from tests.end_to_end.clusters import Running, running
from tests.end_to_end.conversations import push_out
from tests.end_to_end.fetching import Returning
from tests.end_to_end.pictures import PIXTRAL, SEEING, asked, engine, file
from tests.end_to_end.two_prefills import TwoPrefills
from tests.golden.images import golden_images, other_image
from tests.shapes import config
from tests.vision import seeing_checkpoint

Images = tuple[PromptImage, ...]


@pytest.mark.ci
async def test_streams_are_those_of_transformers_on_sharded_prefill_meshes(tmp_path: Path) -> None:
    found, images = golden_images(PIXTRAL)
    prompt, greedy = found["prompt"].tolist(), found["greedy"].tolist()
    other = (other_image(images[0]), images[1])
    async with running(engine(tmp_path / "alone", PIXTRAL, Mode.UNIFIED)) as run:
        alone = (await run.complete(asked(run, prompt, other))).tokens
    made = replace(
        engine(tmp_path, PIXTRAL, Mode.DISAGGREGATED, prefill="tp=2", decode="dp=2"),
        prefix=PrefixConfig(),
    )
    async with running(made) as run:
        requests = [asked(run, prompt, (images, other)[at % 2], f"r{at}") for at in range(6)]
        done = await run.complete_all(requests)
        ranks = [
            {row.rank for row in one.rows if row.images}
            for one in run.recording.prefill
            if isinstance(one, PrefillChunk)
        ]
        assert max(map(len, ranks)) == made.prefill.layout.dp, "no chunk had images on all ranks"
    assert [one.tokens for one in done] == [{0: greedy}, alone] * 3


async def cached_in(run: Running, name: str, images: Images) -> CachedTokens:
    """Completes the golden prompt with these images. Returns the origin of cached tokens; the
    tokens are those of transformers if the images are."""
    found, golden = golden_images(PIXTRAL)
    done = await run.complete(asked(run, found["prompt"].tolist(), images, name))
    assert images != golden or done.tokens[0] == found["greedy"].tolist()
    assert done.usage is not None and done.usage.cached_by_tier is not None
    return done.usage.cached_by_tier


def few_pages(folder: Path, prefix: PrefixConfig) -> EngineConfig:
    made = engine(folder, PIXTRAL, Mode.DISAGGREGATED)
    return replace(made, prefill=replace(made.prefill, pages_per_rank=16), prefix=prefix)


@pytest.mark.ci
async def test_kv_of_images_comes_back_from_host_memory_for_the_same_image_alone(
    tmp_path: Path,
) -> None:
    _, images = golden_images(PIXTRAL)
    other = (other_image(images[0]), images[1])
    prefix = PrefixConfig(True, 16, host_gib=0.25, restores="always")
    async with running(few_pages(tmp_path, prefix)) as run:
        assert (await cached_in(run, "first", images)).total == 0
        await push_out(run, 240)
        assert (await cached_in(run, "other", other)).total == 0
        await push_out(run, 240)
        assert (await cached_in(run, "again", images)).host >= 16
        counters = run.cluster._workers[0].counters
        assert counters["host_blocks_broken"] == counters["host_restores_failed"] == 0


@pytest.mark.ci
async def test_kv_of_images_is_fetched_from_a_peer_for_the_same_image_alone(tmp_path: Path) -> None:
    _, images = golden_images(PIXTRAL)
    other = (other_image(images[0]), images[1])
    made = engine(tmp_path, PIXTRAL, Mode.DISAGGREGATED, decode_page=8)
    made = replace(made, prefix=PrefixConfig(True, 16, host_gib=0, peer_fetch=True))
    async with running(made, kind=Returning) as run:
        prefill, decode = run.cluster._workers
        await cached_in(run, "first", images)
        prefill._kept.clear()
        assert (await cached_in(run, "second other", other)).total == 0
        assert prefill.counters["peer_tokens_restored"] == 0
        prefill._kept.clear()
        found = await cached_in(run, "second", images)
        assert prefill.counters["peer_tokens_restored"] == found.total >= 16
        assert decode.counters["peer_blocks_given"] > 0


@pytest.mark.ci
async def test_a_prompt_with_images_whose_prefill_worker_dies_is_computed_by_another(
    tmp_path: Path,
) -> None:
    """The request has files alone; each call to a prefill worker has pixels."""
    found, images = golden_images(PIXTRAL)
    directory = seeing_checkpoint(PIXTRAL, tmp_path)
    made = config(directory=directory, **SEEING)
    files = tuple(replace(one, file=file(one)).without_pixels(keep_file=True) for one in images)
    async with running(made, kind=TwoPrefills) as run:
        cluster = run.cluster
        assert isinstance(cluster, TwoPrefills)
        reader, read = ImageReader(lambda: run.tokenizer.images, LimitsConfig()), list[int]()

        async def pixels(image: PromptImage) -> bytes:
            read.append(image.start)
            return await reader.pixels(image)

        cluster.path.read_images_with(pixels)
        cluster.fatal = 2
        done = await run.complete(asked(run, found["prompt"].tolist(), files))
        assert len(cluster.dead) == 1, "no prefill worker died"
        assert done.tokens[0] == found["greedy"].tolist()
        assert read == [one.start for one in images] * 2
        assert cluster.path.counters["sources_replaced"] == 1
