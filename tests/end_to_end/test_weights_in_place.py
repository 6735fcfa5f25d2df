"""A running cluster takes other weights. The oracles are dense forward passes over the checkpoints,
and clusters that started with the new weights."""

import asyncio
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jdisagg import weights
from jdisagg.config import Mode
from jdisagg.engine.replica import Replica
from jdisagg.errors import DeadlineExceededError, JdisaggError
from jdisagg.messages.step_commands import (
    DecodeSteps,
    DropWeights,
    OfferWeights,
    PutWeights,
    ReadWeights,
    SleepMesh,
    WakeMesh,
)
from jdisagg.messages.weights import UpdateMode
from jdisagg.model_api import Model
from tests import time_scale
from tests.end_to_end.adapters import merged, named, with_slots, write_adapter
from tests.end_to_end.clusters import Running, collect, dense_greedy, greedy_beginning, running
from tests.end_to_end.other_weights import (
    PAGES,
    TOKENS,
    WORDS,
    ask,
    cold,
    device_bytes,
    flip,
    perturbed,
    versions,
    with_sums,
)
from tests.fakes.cluster import Collected
from tests.lanes import first_ci
from tests.models.next_token_checkpoints import with_next_token_layer
from tests.shapes import FEW_PAGES, LLAMA, MOE, config

MADE = ("draft layer", "adapters", "stages", "int8", "experts", "fp8 kv")  # from weights


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed(tmp_path_factory.mktemp("weights") / "other", LLAMA, 1)


@pytest.mark.ci
async def test_after_an_update_answers_and_log_probabilities_are_those_of_a_cold_start(
    other: Path,
) -> None:
    engine = replace(config(), prefix=PAGES)
    async with running(engine) as run:
        prompt = run.tokenizer.encode(WORDS)
        before = await ask(run, "before")
        assert before.tokens[0] == dense_greedy(LLAMA, prompt, TOKENS)
        assert before.usage and before.usage.weights == ()
        await ask(run, "hit")  # compiles the programs of a hit
        compiled = run.cluster.compilations
        report = await run.cluster.weights.update(str(other), "step-1")
        assert report.weights.startswith("step-1@") and report.bytes > 0 and not report.failed
        assert await versions(run) == {report.weights}
        after = await ask(run, "after")
        assert after.tokens[0] == dense_greedy(other, prompt, TOKENS) != before.tokens[0]
        assert after.usage and after.usage.weights == (("step-1", TOKENS),)
        assert after.usage.cached_tokens == 0, "KV of the old weights serves no request"
        warm = await ask(run, "warm")
        assert warm.usage and warm.usage.cached_tokens >= 16
        assert warm.tokens == after.tokens
        assert run.cluster.compilations == compiled
        again = await run.cluster.weights.update(str(other), "step-1")
        assert again.weights == report.weights and again.bytes == 0
        puts = [one for one in run.recording.decode if isinstance(one, PutWeights)]
        assert len(puts) == 1, "weights that are served already are not put again"
    assert (await cold(engine, other)).logprobs == after.logprobs


async def with_update(
    run: Running, folder: Path, mode: UpdateMode, after: int, tokens: int, **sampling: object
) -> tuple[Collected, Collected]:
    """The answer of a request during which, after some tokens, the weights are updated; and that of
    a request that comes while placement is paused."""
    updates: list[asyncio.Task[Collected]] = []
    events, seen = [], 0
    asked = run.request(WORDS, "long", max_tokens=tokens, ignore_eos=True, **sampling)

    async def update() -> Collected:
        path, late = run.cluster.path, None
        updating = asyncio.create_task(run.cluster.weights.update(str(folder), "new", mode))
        while not updating.done():
            await asyncio.sleep(0)
            if late is None and not path._open.is_set():
                late = asyncio.create_task(ask(run, "late"))
        await updating
        assert late is not None, "placement paused"
        return await late

    async for event in run.cluster.stream(asked):
        events.append(event)
        seen += len(event.token_ids)
        if seen >= after and not updates:
            updates.append(asyncio.create_task(update()))
    assert updates, "the request was too short"
    return collect(events), await updates[0]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("mode", "prefix"), first_ci([("disaggregated", True), ("chunked", False)])
)
async def test_running_sequences_keep_accepted_tokens_and_continue_with_the_new_weights(
    other: Path, mode: str, prefix: bool
) -> None:
    engine = config(Mode(mode))
    engine = replace(engine, prefix=PAGES) if prefix else engine
    async with running(engine) as run:
        prompt = run.tokenizer.encode(WORDS)
        await ask(run, "first")  # compiles
        done, late = await with_update(run, other, UpdateMode.RECOMPUTE, 5, 300)
        assert done.usage and [version for version, _ in done.usage.weights] == ["", "new"]
        (_, old), (_, new) = done.usage.weights
        tokens = done.tokens[0]
        assert old >= 5 and new >= TOKENS and old + new == len(tokens) == 300
        assert greedy_beginning(LLAMA, prompt, tokens[:old]) == old
        # the oracle: the accepted tokens as a prompt, with the new weights
        assert greedy_beginning(other, [*prompt, *tokens[:old]], tokens[old:]) == new
        assert late.tokens[0] == dense_greedy(other, prompt, TOKENS)
        assert done.timings and done.timings.preemptions >= 1


@pytest.mark.ci
async def test_usage_has_the_versions_of_all_children_of_a_request(other: Path) -> None:
    async with running(config()) as run:
        await ask(run, "first", n=2)
        done, _ = await with_update(run, other, UpdateMode.RECOMPUTE, 8, 150, n=2)
        assert done.usage and len(done.tokens) == 2
        used = dict(done.usage.weights)
        assert set(used) == {"", "new"} and sum(used.values()) == 300
        prompt = run.tokenizer.encode(WORDS)
        old, new = (dense_greedy(folder, prompt, 1) for folder in (LLAMA, other))
        assert {one[0] for one in done.tokens.values()} <= {old[0], new[0]}


@pytest.mark.ci
async def test_with_memory_for_two_copies_decode_steps_go_on_until_the_put_and_right_after_it(
    other: Path,
) -> None:
    """A pause is a number of the mesh's commands: no time is measured."""
    async with running(config()) as run:
        await ask(run, "first")
        done, _ = await with_update(run, other, UpdateMode.KEEP, 5, 200)
        assert done.usage and [version for version, _ in done.usage.weights] == ["", "new"]
        commands = run.recording.decode
        begun = next(at for at, one in enumerate(commands) if isinstance(one, ReadWeights))
        put = next(at for at, one in enumerate(commands) if isinstance(one, PutWeights))
        steps = [at for at, one in enumerate(commands) if isinstance(one, DecodeSteps)]
        assert any(begun < at < put for at in steps), "it decodes while it reads"
        before, after = max(a for a in steps if a < put), min(a for a in steps if a > put)
        between = commands[before + 1 : after]
        # blocks of the request that waited for the update may come between as well
        of_weights = (ReadWeights, PutWeights, DropWeights, OfferWeights, SleepMesh, WakeMesh)
        assert [one for one in between if isinstance(one, of_weights)] == [commands[put]]
        assert done.timings and done.timings.preemptions == 0


@pytest.mark.ci
async def test_no_name_of_the_old_weights_is_left_anywhere(other: Path) -> None:
    tiers = replace(PAGES, host_gib=0.05)
    async with running(replace(config(**FEW_PAGES), prefix=tiers)) as run:
        await ask(run, "first")

        def kept() -> set[tuple[str, str]]:
            """Tier and name of each cached block, pages first."""
            workers = run.cluster._workers
            return {(one.tier, one.name) for worker in workers for one in worker.kept_blocks()}

        async with asyncio.timeout(time_scale.seconds(30.0)):
            while {tier for tier, _ in kept()} < {"pages", "host"}:
                await ask(run, "again", f"{len(kept())} {WORDS} " * 6)
        before = kept()
        await run.cluster.weights.update(str(other), "new")
        assert not kept(), "tiers are cleared before the next command"
        await ask(run, "new")
        after = {name for _, name in kept()}
        assert after and after.isdisjoint({name for _, name in before})


@pytest.mark.ci
async def test_a_drain_ends_running_requests_with_the_old_weights_before(other: Path) -> None:
    async with running(replace(config(), prefix=PAGES)) as run:
        prompt = run.tokenizer.encode(WORDS)
        await ask(run, "first")
        done, late = await with_update(run, other, UpdateMode.DRAIN, 3, 60)
        assert greedy_beginning(LLAMA, prompt, done.tokens[0]) == 60
        assert done.usage and done.usage.weights == ()
        assert late.tokens[0] == dense_greedy(other, prompt, TOKENS)


@pytest.mark.ci
async def test_sequences_that_keep_their_kv_leave_none_of_it_to_requests_after_them(
    other: Path,
) -> None:
    engine = config()
    async with running(replace(engine, prefix=PAGES)) as run:
        prompt = run.tokenizer.encode(WORDS)
        await ask(run, "first")
        done, late = await with_update(run, other, UpdateMode.KEEP, 5, 200)
        assert done.timings and done.timings.preemptions == 0
        assert done.usage and [version for version, _ in done.usage.weights] == ["", "new"]
        old = done.usage.weights[0][1]
        tokens = done.tokens[0]
        assert old - 2 <= greedy_beginning(LLAMA, prompt, tokens) < 200
        assert late.tokens[0] == dense_greedy(other, prompt, TOKENS)
        history = [*prompt, *tokens]
        follow = await run.complete(
            run.request(history, "next", max_tokens=TOKENS, ignore_eos=True)
        )
        assert follow.usage and follow.usage.cached_tokens <= len(prompt)  # what `late` left
        assert follow.tokens[0] == dense_greedy(other, history, TOKENS)


def of_other_shapes(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    tensors = dict(load_file(folder / "model.safetensors"))
    wide = fields["intermediate_size"] // 2
    for name, tensor in tensors.items():
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensors[name] = tensor[:wide].copy()
        elif name.endswith("down_proj.weight"):
            tensors[name] = tensor[:, :wide].copy()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields | {"intermediate_size": wide}))


def without_a_tensor(folder: Path) -> None:
    tensors = dict(load_file(folder / "model.safetensors"))
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")


def of_another_rotation(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"rope_theta": 5000.0}))


def with_one_flipped_bit(folder: Path) -> None:
    with_sums(folder)
    flip(folder / "model.safetensors")


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.ci
async def test_a_folder_that_cannot_be_served_is_refused_and_the_old_weights_serve_on(
    tmp_path: Path,
) -> None:
    spoils = {
        "configuration or other shapes": of_other_shapes,
        "model.norm.weight": without_a_tensor,
        "another configuration": of_another_rotation,
        "SHA-256": with_one_flipped_bit,
        "model.safetensors": cut_short,
    }
    async with running(replace(config(), prefix=PAGES)) as run:
        prompt = run.tokenizer.encode(WORDS)
        expected = dense_greedy(LLAMA, prompt, TOKENS)
        assert (await ask(run, "first")).tokens[0] == expected
        for number, (text, spoil) in enumerate(spoils.items()):
            folder = perturbed(tmp_path / f"bad{number}", LLAMA, number)
            spoil(folder)
            with pytest.raises(JdisaggError, match=text):
                await run.cluster.weights.update(str(folder), "bad")
        with pytest.raises(JdisaggError, match="nowhere"):
            await run.cluster.weights.update(str(tmp_path / "nowhere"))
        assert await versions(run) == {""}
        again = await ask(run, "again")
        assert again.tokens[0] == expected
        assert again.usage and again.usage.cached_tokens >= 16, "the cache stays, too"
        good = with_sums(perturbed(tmp_path / "good", LLAMA, 9))
        await run.cluster.weights.update(str(good), "good")
        assert (await ask(run, "good")).tokens[0] == dense_greedy(good, prompt, TOKENS)


@pytest.mark.ci
async def test_a_reading_ends_with_its_update_and_the_next_one_begins_at_once(other: Path) -> None:
    ended = threading.Event()

    def endless(*given: object) -> tuple[str, Model]:
        check = given[-1]
        assert callable(check)
        try:
            while True:
                check()
                time.sleep(0.01)
        finally:
            ended.set()

    async with running(config()) as run:
        weights, swaps = run.cluster.weights, run.cluster.decode.executor.swaps
        source = swaps.source
        for limited in (True, False):
            ended.clear()
            swaps.source = SimpleNamespace(read=endless)  # type: ignore[assignment]
            update = asyncio.create_task(
                weights.update(str(other), deadline_seconds=0.3 if limited else 600.0)
            )
            if not limited:
                while swaps._reading is None:
                    await asyncio.sleep(0.01)
                update.cancel()
            with pytest.raises(DeadlineExceededError if limited else asyncio.CancelledError):
                await update
            assert await asyncio.to_thread(ended.wait, time_scale.seconds(10.0))
        swaps.source = source
        await weights.update(str(other), "new")
        assert len(await versions(run)) == 1


@pytest.mark.ci
@pytest.mark.parametrize(("case",), first_ci(zip(MADE)))
async def test_all_that_is_made_from_weights_is_made_anew(tmp_path: Path, case: str) -> None:
    base = MOE if case == "experts" else LLAMA
    engine = config(prefill="tp=2,ep=2" if case == "experts" else "tp=2", directory=base)
    if case == "stages":
        engine = with_slots(config(prefill="pp=2", decode="pp=2,tp=2"))
    if case == "int8":
        engine = replace(engine, model=replace(engine.model, weights="int8"))
    if case == "fp8 kv":
        engine = replace(engine, model=replace(engine.model, kv_dtype="fp8"))
    if case == "adapters":
        engine = with_slots(engine)
    if case == "draft layer":
        base = with_next_token_layer(LLAMA, tmp_path / "base")
        sides = (replace(side, speculate="mtp") for side in (engine.prefill, engine.decode))
        model = replace(engine.model, directory=str(base))
        engine = replace(
            engine, model=model, **dict(zip(("prefill", "decode"), sides, strict=True))
        )
    other = perturbed(tmp_path / "other", base, 1)
    adapter = None
    if engine.decode.adapters:
        folder = write_adapter(tmp_path / "adapter", LLAMA, 3, strength=2.0)
        adapter = named(folder)
    async with running(engine) as run:

        async def both(name: str) -> list[Collected]:
            plain = await ask(run, name)
            if adapter is None:
                return [plain]
            asked = run.request(WORDS, name + "a", max_tokens=TOKENS, ignore_eos=True, logprobs=2)
            return [plain, await run.complete(replace(asked, adapter=adapter))]

        before = await both("before")
        await run.cluster.weights.update(str(other), "new")
        after = await both("after")
        assert [one.tokens for one in before] != [one.tokens for one in after]
        if adapter is not None:
            whole = merged(tmp_path / "merged", other, Path(adapter.path))
            prompt = run.tokenizer.encode(WORDS)
            assert after[1].tokens[0] == dense_greedy(whole, prompt, TOKENS)
        drafted = [status.drafted_tokens for status in await run.cluster.status()]
        served = [*leaves(run.cluster.decode), *leaves(run.cluster.prefill)]
    engine = replace(engine, model=replace(engine.model, directory=str(other)))
    async with running(engine) as run:
        started = await ask(run, "cold")
        fresh = [*leaves(run.cluster.decode), *leaves(run.cluster.prefill)]
    assert all(np.array_equal(*pair) for pair in zip(served, fresh, strict=True))
    assert started.tokens == after[0].tokens
    # Drafts give a step more rows, which rounds otherwise; their number depends on times.
    assert case == "draft layer" or started.logprobs == after[0].logprobs
    assert case != "draft layer" or sum(drafted)


def leaves(replica: Replica | None) -> list[np.ndarray]:
    """All weights of a mesh, without adapters."""
    assert replica is not None
    held = replica.executor._stages[0].weights
    parts = [held.stem, *held.layers, *([held.next_token] if held.next_token else [])]
    parts += [held.head] if held.head is not held.stem else []
    return [
        np.asarray(leaf)
        for part in parts
        for number, leaf in enumerate(part.leaves)
        if number not in {place.leaf for place in part.stacks}
    ]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("level", "prefill"),
    [
        (1, "tp=2"),
        pytest.param(2, "tp=2", marks=pytest.mark.slow),
        pytest.param(1, "pp=2", marks=pytest.mark.slow),
    ],
)
async def test_a_sleeping_cluster_has_freed_weights_and_pages_and_wakes_with_both(
    tmp_path: Path, level: int, prefill: str
) -> None:
    async with running(with_slots(replace(config(prefill=prefill), prefix=PAGES))) as run:
        adapter = named(write_adapter(tmp_path / "adapter", LLAMA, 3, strength=2.0))
        asked = run.request(WORDS, "a", max_tokens=TOKENS, ignore_eos=True, logprobs=2)
        adapted = await run.complete(replace(asked, adapter=adapter))
        before, awake = await ask(run, "before"), device_bytes(run)
        size = sum(leaf.nbytes for replica in run.cluster.replicas for leaf in leaves(replica))
        statuses = await run.cluster.weights.sleep(level)
        assert len(statuses) == 2 and all(status.asleep for status in statuses)
        pages = sum(replica.executor.pool_bytes for replica in run.cluster.replicas)
        assert pages == 0 and awake - device_bytes(run) > size
        with pytest.raises(JdisaggError, match="asleep"):
            await ask(run, "refused")
        await run.cluster.weights.sleep(level)  # idempotent
        statuses = await run.cluster.weights.wake()
        assert not any(status.asleep for status in statuses)
        assert abs(device_bytes(run) - awake) < 1024, "but for results of the newest commands"
        after = await ask(run, "after")
        assert (after.tokens, after.logprobs) == (before.tokens, before.logprobs)
        assert after.usage and after.usage.cached_tokens == 0, "the pages were freed"
        again = await run.complete(replace(asked, request_id="a2", adapter=adapter))
        assert (again.tokens, again.logprobs) == (adapted.tokens, adapted.logprobs)
        assert run.cluster.decode.executor.swaps._resting is None


@pytest.mark.ci
async def test_running_requests_wait_for_the_end_of_a_sleep(tmp_path: Path) -> None:
    async with running(config()) as run:
        prompt = run.tokenizer.encode(WORDS)
        await ask(run, "first")
        events, slept = [], []

        async def sleep_and_wake() -> None:
            async with run.cluster.path.paused(None):  # as a router that waits for workers
                await run.cluster.weights.sleep(1)
                await run.cluster.weights.wake()

        asked = run.request(WORDS, "long", max_tokens=100, ignore_eos=True)
        async for event in run.cluster.stream(asked):
            events.append(event)
            if len(events) == 5:
                slept.append(asyncio.create_task(sleep_and_wake()))
        await slept[0]
        assert greedy_beginning(LLAMA, prompt, collect(events).tokens[0]) == 100
        assert sum(status.preemptions for status in await run.cluster.status()) >= 1


@pytest.mark.ci
@pytest.mark.parametrize(("quantized",), first_ci([("",), ("int8",)]))
async def test_a_trainer_in_the_process_offers_sharded_arrays_and_each_byte_is_read_once_a_shard(
    other: Path, quantized: str
) -> None:
    tensors = load_file(other / "model.safetensors")
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[4:8])
    tree: dict[str, object] = {}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        axis = number % tensor.ndim
        split: list[str | None] = [None] * tensor.ndim
        if number % 3 and tensor.shape[axis] % 4 == 0:
            split[axis] = "x"
        spec = jax.sharding.PartitionSpec(*split)
        tree[name] = jax.device_put(tensor, jax.sharding.NamedSharding(mesh, spec))
    engine = config()
    engine = replace(engine, model=replace(engine.model, weights=quantized))
    async with running(engine) as run:
        await ask(run, "before")
        with weights.offer(tree) as offer:
            await run.cluster.weights.update(offer.name, "step")
            read = offer.bytes_read
        after = await ask(run, "after")
        if not quantized:
            prompt = run.tokenizer.encode(WORDS)
            assert after.tokens[0] == dense_greedy(other, prompt, TOKENS)
            # Two meshes, and no byte for a replica or for the layer that drafts.
            unread = "model.layers.4."
            sizes = [one.nbytes for name, one in tensors.items() if not name.startswith(unread)]
            assert read == 2 * sum(sizes)
        with pytest.raises(JdisaggError, match="no such offer"):
            await run.cluster.weights.update(offer.name, "late")
        tree.popitem()
        with weights.offer(tree) as offer, pytest.raises(JdisaggError, match="missing"):
            await run.cluster.weights.update(offer.name, "incomplete")
        ended = weights.offer(tensors, lease_seconds=0.0)
        with ended, pytest.raises(JdisaggError, match="lease has ended"):
            await run.cluster.weights.update(ended.name, "too late")
        assert (await ask(run, "again")).logprobs == after.logprobs
    assert (await cold(engine, other)).logprobs == after.logprobs
