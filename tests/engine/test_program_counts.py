"""The number of programs of a start, counted by warm-up with shapes in place of arrays: nothing is
traced, compiled or run. Each program is minutes of compilation on an accelerator, and each size or
form that is added multiplies with others."""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import configs
from configs import tiny_cpu
from jdisagg.assembly import WorkerHost
from jdisagg.clock import MonotonicClock
from jdisagg.config import EngineConfig, Mode
from jdisagg.dispatch.ids import random_id
from jdisagg.engine import replica
from jdisagg.engine.limits import worker_config
from jdisagg.engine.prefix_defaults import engine_defaults
from jdisagg.executor.choose import Chosen
from jdisagg.executor.mesh_executor import MeshExecutor
from jdisagg.executor.programs import Programs
from jdisagg.executor.warm_up import warm_up_steps
from jdisagg.grammar.compiler import GrammarCompiler
from jdisagg.layout.axes import Layout
from jdisagg.messages.worker_status import WorkerRole
from jdisagg.node.recipes import for_accelerators, load_recipe
from jdisagg.transfer.in_process import InProcessChannel
from jdisagg.worker.mesh_worker import WorkerContext
from models.checkpoint import load_model
from tests.end_to_end.clusters import LLAMA

RECIPES = sorted(Path(configs.__file__).parent.glob("*_h200.py"))


@dataclass(frozen=True)
class _Array:
    shape: tuple[int, ...]
    dtype: Any = np.dtype(np.float32)

    def block_until_ready(self) -> "_Array":
        return self


class _Shapes(Programs):
    """Programs whose results have shapes alone. `used` are their keys."""

    def __init__(self, mesh: jax.sharding.Mesh, platform: str) -> None:
        super().__init__(mesh)
        self.platform = platform
        self.used: set[Hashable] = set()
        self.emits = True

    def zeros(self, shape: tuple[int, ...], dtype: Any, spec: Any) -> Any:
        return _Array(shape, np.dtype(dtype))

    def put(self, host: Any) -> Any:
        return host

    def get(self, key: Hashable, build: object) -> Callable[..., Any]:
        assert isinstance(key, tuple)
        self.used.add(key)
        if key[0] == "group":
            return lambda *arguments: _group(*arguments, emits=self.emits)
        return lambda *arguments: _RESULTS[key[0]](*arguments)


def _group(layers: Any, pages: Any, states: Any, x: Any, *chunk: Any, emits: bool) -> Any:
    positions, sampling = chunk[0], chunk[6]
    parts = [part for layer in pages for part in layer]
    block = _Array((len(positions), len(parts), parts[0].shape[1], positions.shape[1], 16))
    result = _Array((*sampling.shape, 16)), pages, states
    return *result, *(([block], [_Array((1,))]) if emits else ([], []))


def _choose(hot: Any, counts: Any, *rest: Any) -> Any:
    return hot, CHOSEN, counts


CHOSEN = Chosen(_Array((1,)), _Array((1,)))  # type: ignore[arg-type]
_RESULTS: dict[str, Callable[..., Any]] = {
    "cut": lambda blocks, offsets: blocks[0],
    "head": lambda *_: CHOSEN,
    "step": lambda edge, layers, kept, hot, counts, *_: (kept, hot, CHOSEN, counts),
    "forward": lambda edge, layers, kept, hot, counts, ints, floats, batch, drafts, x: (
        kept,
        _Array((1, batch.shape[1] * (2 if drafts else 1), 16)),
    ),
    "choose": _choose,
    "mixed": lambda stem, layers, kept, *rest: (
        kept[0],
        _Array((1, 32, 16)),
        _Array((1, 16, 16)),
        rest[-1],
    ),
    "admit": lambda state, *_: state,
    "insert": lambda pages, *_: (pages, _Array((1,))),
    "extract": lambda pages, words: (_Array((1,)), _Array((1,))),
    "copy": lambda layers, pairs: layers,
}


def programs_of(
    recipe: EngineConfig, platform: str, monkeypatch: pytest.MonkeyPatch, embedded: bool = True
) -> Counter:
    """Returns the number of programs of each kind that the meshes of a recipe compile for requests
    of all kinds, with at most two devices along each axis, in one process or as workers."""
    config = engine_defaults(recipe, 1 << 36)
    made: list[_Shapes] = []

    def programs(mesh: jax.sharding.Mesh) -> _Shapes:
        made.append(_Shapes(mesh, platform))
        return made[-1]

    monkeypatch.setattr(replica, "Programs", programs)
    two = config.mode is Mode.DISAGGREGATED
    executors: list[MeshExecutor] = []
    for role in (WorkerRole.PREFILL, WorkerRole.DECODE) if two else (WorkerRole.MIXED,):
        asked = worker_config(config, role)
        wanted = asked.instance.layout
        layout = Layout(dp=min(wanted.dp, 2), tp=min(wanted.tp, 2))
        sized = replace(asked.instance, layout=layout, pages_per_rank=64)
        model = replace(asked.model, context_tokens=256)
        context = WorkerContext(role.name, MonotonicClock(), random_id)
        worker = replace(asked, instance=sized, model=model)
        host = WorkerHost(context, role, worker, migrates=not embedded)
        load, channel = partial(load_model, str(LLAMA)), InProcessChannel(MonotonicClock())
        built = replica.build_replica(host, load, jax.devices(), channel)
        made[-1].emits = built.executor.role.emit
        executors.append(built.executor)
        built.executor.constrain(GrammarCompiler(lambda: None))  # type: ignore[arg-type, return-value]
    try:
        executors[-1].expect(executors[0].card)
        for executor in executors:
            for step in warm_up_steps(executor):
                step()
    finally:
        for executor in executors:
            executor.close()
    return Counter(key[0] for one in made for key in one.used)  # type: ignore[index]


def test_a_start_on_a_cpu_has_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = programs_of(tiny_cpu.get_config(), "cpu", monkeypatch)
    assert found.total() <= 32, found
    assert found["step"] == 4


def test_a_start_compiles_the_prompts_that_decode_meshes_append(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = tiny_cpu.get_config()
    alone, appending = (
        programs_of(
            replace(recipe, prefix=replace(recipe.prefix, append_tokens=tokens)), "cpu", monkeypatch
        )
        for tokens in (0, 64)
    )
    assert appending - alone == Counter(group=1, head=1), (alone, appending)


def test_a_start_compiles_what_moves_tails_to_host_memory_and_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their pieces are shorter than a block. With a grid there are no tails."""
    recipe = tiny_cpu.get_config()
    without, tails = (
        programs_of(
            replace(recipe, prefix=replace(recipe.prefix, append_tokens=0, grid_tokens=grid)),
            "cpu",
            monkeypatch,
        )
        for grid in (128, None)
    )
    assert tails - without == Counter(extract=1, insert=1), (without, tails)


def test_a_start_on_one_gpu_has_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = for_accelerators(tiny_cpu.get_config(), 1)
    assert recipe.mode is Mode.CHUNKED
    found = programs_of(recipe, "gpu", monkeypatch)
    assert found.total() <= 25, found
    assert (found["step"], found["mixed"], found["group"]) == (2, 3, 3)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_no_recipe_has_many_programs(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = programs_of(load_recipe(str(recipe)), "gpu", monkeypatch, embedded=False)
    assert found.total() <= 40, found
