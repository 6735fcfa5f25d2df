"""Weights from a trainer in another process, over the layouts of the KV tests, and with faults on
the way. The oracles are cold starts from a checkpoint with the same weights: their parameters and
the logits of a dense pass, and the sizes of the checkpoint's tensors."""

import asyncio
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jdisagg import weights
from jdisagg.errors import JdisaggError
from jdisagg.layout.axes import Layout
from jdisagg.messages.weights import UpdateMode
from jdisagg.node import weights_reader
from jdisagg.node.weights_reader import RemoteWeights
from jdisagg.ops.dense_attention import dense_causal_attend
from jdisagg.transfer.backend import AnnouncedArrays
from jdisagg.transfer.shared_memory import SharedMemory
from jdisagg.transfer.transfer_engine import EngineInlet
from launch.model import loader
from models.checkpoint import load_model
from models.parameter_tree import with_arrays
from tests.end_to_end.clusters import dense_greedy, greedy_beginning, running
from tests.end_to_end.other_weights import TOKENS, WORDS, ask, device_bytes, perturbed, versions
from tests.end_to_end.pairwise import pairwise
from tests.end_to_end.trainer import SPLITS, Trainer, trainer, trainers
from tests.lanes import first_ci
from tests.shapes import LLAMA, MOE, config

# The source's form: tensors of a checkpoint in some sharding, or the parameters of a worker with
# some layout.
SOURCES = (*SPLITS, "tp=1", "tp=4", "dp=2,tp=2")
LAYOUTS = ("tp=1", "tp=2", "tp=4", "dp=2,tp=2", "dp=4")
DTYPES = ("float32", "bfloat16")
MOE_LAYOUTS = ("tp=2,ep=2", "dp=2,tp=2,ep=4", "tp=4,ep=4")
CASES = [("llama", *case) for case in pairwise(SOURCES, LAYOUTS, DTYPES)]
CASES += [("qwen3_moe", *case, "float32") for case in zip(SOURCES, MOE_LAYOUTS * 3, strict=False)]
BASES = {"llama": LLAMA, "qwen3_moe": MOE}


@pytest.fixture(scope="module")
def source() -> Iterator[Trainer]:
    with trainer() as started:
        yield started


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("others")
    return {name: perturbed(folder / name, base, 1) for name, base in BASES.items()}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model takes many blocks."""
    monkeypatch.setattr(weights_reader, "BLOCK_BYTES", 32 << 10)
    monkeypatch.setattr(weights_reader, "AHEAD_BYTES", 128 << 10)


@pytest.fixture
def read_by(monkeypatch: pytest.MonkeyPatch) -> list[RemoteWeights]:
    """All readers of this process from now on."""
    readers: list[RemoteWeights] = []

    class Kept(RemoteWeights):
        def close(self) -> None:
            readers.append(self)
            moved = sum(self._endpoint.channel.bytes_per_pair().values())
            assert moved == self.bytes_moved, "the channel has counted other bytes"
            super().close()

    monkeypatch.setattr(weights, "RemoteWeights", Kept)
    return readers


@cache
def logits_of(model: nnx.Module) -> np.ndarray:
    tokens = np.arange(5, 37, dtype=np.int32)
    places = jnp.arange(len(tokens), dtype=jnp.int32)
    return np.asarray(jax.jit(lambda ids: model(ids, places, dense_causal_attend))(tokens))


def leaves(model: object) -> list[jax.Array]:
    assert isinstance(model, nnx.Module)
    return jax.tree.leaves(nnx.state(model))


def check(
    source: Trainer,
    others: dict[str, Path],
    read_by: list[RemoteWeights],
    case: tuple[str, str, str, str],
) -> None:
    name, form, text, dtype = case
    folder, layout = others[name], Layout.parse(text)
    named = source.offer(folder, form) if form in SPLITS else source.serve(folder, form, dtype)
    devices = jax.devices()[: layout.devices]
    content, model = loader(str(BASES[name]), dtype).read(named, layout, devices)
    assert len(content) == 32
    fresh = load_model(folder, layout, devices, dtype=dtype).model
    for found, expected in zip(leaves(model), leaves(fresh), strict=True):
        assert found.sharding == expected.sharding and found.dtype == expected.dtype
        for one, other in zip(found.addressable_shards, expected.addressable_shards, strict=True):
            assert np.asarray(one.data).tobytes() == np.asarray(other.data).tobytes()
    plain = load_model(folder, Layout(), jax.devices()[:1], dtype=dtype).model
    here = [jax.device_put(np.asarray(leaf), jax.devices()[0]) for leaf in leaves(model)]
    if all(one.shape == other.shape for one, other in zip(here, leaves(plain), strict=True)):
        gathered = with_arrays(plain, here)
        assert logits_of(gathered).tobytes() == logits_of(plain).tobytes()
        assert (
            logits_of(
                load_model(BASES[name], Layout(), jax.devices()[:1], dtype=dtype).model
            ).tobytes()
            != logits_of(plain).tobytes()
        )
    else:
        assert layout.tp > 1, "only a padded vocabulary has another shape"
    if form in SPLITS:
        sizes = load_file(folder / "model.safetensors")
        unread = f"model.layers.{len(plain.kv_spec.layers)}."
        planned = sum(one.nbytes for key, one in sizes.items() if not key.startswith(unread))
    else:
        planned = sum(leaf.nbytes for leaf in leaves(plain))
    (reader,) = read_by
    assert reader.bytes_moved == source.bytes_read() == planned


@pytest.mark.ci
@pytest.mark.parametrize(("case",), first_ci(zip(CASES), ci=3), ids=str)
def test_workers_of_any_layout_read_the_weights_of_any_layout_and_each_byte_once(
    source: Trainer, others: dict[str, Path], read_by: list[RemoteWeights], case
) -> None:
    check(source, others, read_by, case)


@pytest.mark.ci
def test_without_shared_memory_weights_come_by_the_transfer_engine(
    source: Trainer,
    others: dict[str, Path],
    read_by: list[RemoteWeights],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SharedMemory, "of_host", staticmethod(lambda: None))
    with monkeypatch.context() as watched:
        pulled: list[int] = []
        pull = EngineInlet.pull

        def counted(inlet: EngineInlet, arrays: AnnouncedArrays) -> list[jax.Array]:
            pulled.append(1)
            return pull(inlet, arrays)

        watched.setattr(EngineInlet, "pull", counted)
        check(source, others, read_by, CASES[0])
    assert len(pulled) > 9


@pytest.mark.ci
def test_a_trainer_of_two_processes_offers_in_each_what_its_devices_hold(
    others: dict[str, Path], read_by: list[RemoteWeights]
) -> None:
    other, devices = others["llama"], jax.devices()[:2]
    with trainers(2) as both:
        for one in both:  # their arrays are made together
            one.connection.send(("offer", (str(other), "columns", 600.0)))
        names = [one.answer() for one in both]
        load = loader(str(LLAMA), "float32")
        _, model = load.read(",".join(names), Layout(tp=2), devices)
        served = [one.bytes_read() for one in both]
        with pytest.raises(JdisaggError, match="no source device holds"):
            load.read(names[0], Layout(tp=2), devices)
    for found, expected in zip(
        leaves(model), leaves(load_model(other, Layout(tp=2), devices).model), strict=True
    ):
        assert np.asarray(found).tobytes() == np.asarray(expected).tobytes()
    assert min(served) > 0 and read_by[0].bytes_moved == sum(served)


@pytest.mark.ci
async def test_faults_of_the_source_leave_all_workers_on_the_old_weights(
    others: dict[str, Path],
) -> None:
    other = others["llama"]
    with trainer() as source:
        async with running(config()) as run:
            expected = (await ask(run, "first")).tokens

            async def refused(name: str, why: str) -> None:
                with pytest.raises(JdisaggError, match=why):
                    await run.cluster.weights.update(name, "bad")
                assert await versions(run) == {""}
                assert (await ask(run, "again")).tokens == expected

            name = source.offer(other, "mixed")
            source.flip(1)
            await refused(name, "checksum of a block")
            assert source.flipped() == 1
            source.flip(0)
            await refused(f"{name}x", "no such offer")
            await refused(source.offer(other, "rows", lease_seconds=0.0), "lease has ended|connect")
            name = source.offer(other, "mixed")
            source.stall_at(9)
            updating = asyncio.create_task(run.cluster.weights.update(name, "killed"))
            await asyncio.to_thread(source.wait_until_stalled)
            assert not updating.done()
            assert (await ask(run, "meanwhile")).tokens == expected
            source.kill()
            with pytest.raises(JdisaggError):
                await updating
            assert await versions(run) == {""}
            assert (await ask(run, "after")).tokens == expected
            with trainer() as second:
                await run.cluster.weights.update(second.offer(other, "mixed"), "good")
            prompt = run.tokenizer.encode(WORDS)
            assert (await ask(run, "good")).tokens[0] == dense_greedy(other, prompt, TOKENS)


@pytest.mark.ci
async def test_an_update_that_is_given_up_during_hand_offs_leaves_streams_as_they_are(
    source: Trainer, others: dict[str, Path]
) -> None:
    async with running(config()) as run:
        prompts = [f"{number} {WORDS}" for number in range(6)]
        alone = [(await ask(run, f"a{at}", text)).tokens for at, text in enumerate(prompts)]
        name = source.offer(others["llama"], "mixed")
        source.stall_at(5)
        updating = asyncio.create_task(run.cluster.weights.update(name, "given up"))
        asked = [asyncio.create_task(ask(run, f"b{at}", one)) for at, one in enumerate(prompts)]
        await asyncio.to_thread(source.wait_until_stalled)
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        assert [one.tokens for one in await asyncio.gather(*asked)] == alone
        assert await versions(run) == {""}


@pytest.mark.ci
@pytest.mark.parametrize(("mode",), first_ci([(UpdateMode.DRAIN,), (UpdateMode.RECOMPUTE,)]))
async def test_workers_without_memory_for_two_copies_sleep_while_they_read(
    source: Trainer, others: dict[str, Path], mode: UpdateMode
) -> None:
    other = others["llama"]
    async with running(config()) as run:
        prompt = run.tokenizer.encode(WORDS)
        await ask(run, "first")
        read: list[int] = []  # bytes on the devices at the end of each reading
        for replica in run.cluster.replicas:
            swaps = replica.executor.swaps
            swaps.free_bytes = lambda device: 1000
            check = swaps._check_form

            def measured(*arguments: object, check=check) -> None:
                read.append(device_bytes(run))
                check(*arguments)

            swaps._check_form = measured  # type: ignore[method-assign]
        awake = device_bytes(run)
        with pytest.raises(JdisaggError, match="mode recompute or drain"):
            await run.cluster.weights.update(str(other), "v", UpdateMode.KEEP)
        long = asyncio.create_task(ask(run, "long", max_tokens=40))
        name = source.offer(other, "mixed")
        report = await run.cluster.weights.update(name, "small", mode)
        assert await versions(run) == {report.weights}
        assert len(read) == 2 and max(read) < awake, "pages and old weights were freed before"
        statuses = await run.cluster.status()
        assert not any(status.asleep for status in statuses)
        tokens = (await long).tokens[0]
        kept = greedy_beginning(LLAMA, prompt, tokens)
        after = tokens[kept:]
        assert greedy_beginning(other, [*prompt, *tokens[:kept]], after) == len(after)
        assert (await ask(run, "new")).tokens[0] == dense_greedy(other, prompt, TOKENS)
        with pytest.raises(JdisaggError, match="nowhere"):
            await run.cluster.weights.update("/nowhere", "bad", mode)
        assert (await ask(run, "still")).tokens[0] == dense_greedy(other, prompt, TOKENS)
