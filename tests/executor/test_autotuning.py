"""Which autotune results a worker's programs use. The test stands for XLA, which writes the file
that it is told to, and reads another."""

import asyncio
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax._src import cache_key

from jdisagg.clock import MonotonicClock
from jdisagg.errors import ConfigError
from jdisagg.executor import program_cache
from jdisagg.executor.autotuning import DUMP, LOAD, Autotuning, kind_name
from jdisagg.executor.program_cache import ProgramCache

KIND = kind_name("NVIDIA H200", "decode", 3)
CLOCK = MonotonicClock()


@pytest.fixture(autouse=True)
def _own_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_key, "custom_hook", cache_key.custom_hook)


def results_of(folder: Path, kind: str = KIND) -> Path:
    return folder / f"autotune-{kind}.textproto"


async def started(folder: Path, tuned: str, kind: str = KIND, *, waits: bool = True) -> Autotuning:
    """A start whose XLA adds `tuned` to the results that it has read."""
    tuning = Autotuning(kind, "gpu", str(folder), waits=waits)
    await tuning.begin(CLOCK)
    if path := tuning.options.get(DUMP):
        earlier = tuning.options.get(LOAD)
        Path(path).write_text((Path(earlier).read_text() if earlier else "") + tuned)
    return tuning


async def test_the_first_start_writes_the_results_that_later_ones_load(tmp_path: Path) -> None:
    first = await started(tmp_path, "a")
    assert set(first.options) == {DUMP} and first.identity == ""
    first.finish()
    assert results_of(tmp_path).read_text() == "a"
    for _ in range(2):
        later = await started(tmp_path, "b")
        assert later.options == {LOAD: str(results_of(tmp_path))}
        later.finish()
        assert later.identity == first.identity and later.identity.startswith(f"{KIND}:")
    assert results_of(tmp_path).read_text() == "a"
    assert sorted(path.name for path in tmp_path.glob("*.textproto"))[1:] == [
        results_of(tmp_path).name
    ], "beside the lock"


async def test_starts_at_the_same_time_wait_for_the_first(tmp_path: Path) -> None:
    first = await started(tmp_path, "a")
    second = asyncio.create_task(started(tmp_path, "b"))
    third = asyncio.create_task(started(tmp_path, "c"))
    other = await started(tmp_path, "d", kind_name("NVIDIA H200", "prefill", 3))
    await asyncio.sleep(0.3)
    assert not second.done() and not third.done() and DUMP in other.options
    first.finish()
    assert (await second).identity == (await third).identity == first.identity


async def test_a_start_goes_on_where_one_that_ended_had_come(tmp_path: Path) -> None:
    """Programs that the ended one compiled are found, and are not tuned again."""
    ended = await started(tmp_path, "a")
    ended._unlock()  # as the kernel does when a process ends
    again = await started(tmp_path, "b")
    again.finish()
    assert results_of(tmp_path).read_text() == "ab"


async def test_results_of_an_ended_start_are_published_if_its_programs_were_all(
    tmp_path: Path,
) -> None:
    ended = await started(tmp_path, "a")
    ended._unlock()
    again = Autotuning(KIND, "gpu", str(tmp_path))
    await again.begin(CLOCK)
    again.finish()  # XLA compiled nothing
    assert results_of(tmp_path).read_text() == "a" and again.identity


async def test_processes_of_an_instance_do_not_wait_and_the_later_says_what_it_has(
    tmp_path: Path,
) -> None:
    one = await started(tmp_path, "a", waits=False)
    one._part.rename(tmp_path / "kept")  # another process has another name
    other = await started(tmp_path, "b", waits=False)
    other.finish()
    (tmp_path / "kept").rename(one._part)
    one.finish()
    assert results_of(tmp_path).read_text() == "b"
    assert one.identity != other.identity


async def test_a_given_file_is_loaded_and_programs_of_other_results_are_not_found(
    tmp_path: Path,
) -> None:
    given = tmp_path / "given"
    given.write_text("x")
    results_of(tmp_path).write_text("a")
    tuning = Autotuning(KIND, "gpu", str(tmp_path), str(given))
    await tuning.begin(CLOCK)
    tuning.finish()
    assert tuning.options == {LOAD: str(given)}
    assert tuning.identity == f"{KIND}:{cache_key.custom_hook()}"
    with pytest.raises(ConfigError, match="autotune_results=.*nowhere.*No such file"):
        await Autotuning(KIND, "gpu", "", str(tmp_path / "nowhere")).begin(CLOCK)


async def test_programs_that_were_found_without_their_results_have_no_identity(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tuning = Autotuning(KIND, "gpu", str(tmp_path))
    await tuning.begin(CLOCK)
    tuning.finish()  # XLA compiled nothing
    assert tuning.identity == "" and "to tune anew" in caplog.text


async def test_a_platform_without_autotuning_has_no_results(tmp_path: Path) -> None:
    tuning = Autotuning(KIND, "cpu", str(tmp_path))
    await tuning.begin(CLOCK)
    tuning.finish()
    assert tuning.options == {} and tuning.identity == "" and not list(tmp_path.iterdir())


def test_a_kind_is_all_that_determines_the_programs() -> None:
    kinds = {kind_name(device, role) for device in ("NVIDIA H200", "H100") for role in "pd"}
    assert len(kinds) == 4
    assert all(f"-{jax.lib.__version__}-" in kind for kind in kinds)
    assert all("/" not in kind and " " not in kind for kind in kinds)


def test_a_program_is_found_wherever_its_results_are_and_not_with_other_given_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    get = ProgramCache.get
    monkeypatch.setattr(
        ProgramCache, "get", lambda cache, key: asked.append(key) or get(cache, key)
    )
    lowered = jax.jit(lambda x: jnp.sin(x) + 41).lower(jax.ShapeDtypeStruct((3,), jnp.float32))
    for options in ({}, {DUMP: str(tmp_path / "a")}, {LOAD: str(tmp_path / "b")}):
        lowered.compile(compiler_options=options)
    assert len(asked) >= 2 and len(set(asked)) == 1
    program_cache.keep_apart("other results")
    lowered.compile(compiler_options={LOAD: str(tmp_path / "c")})
    assert len(set(asked)) == 2
