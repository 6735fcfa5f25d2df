"""Chunks and steps on the meshes of two pipeline stages, by hand."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest

from jdisagg.errors import LayoutError
from jdisagg.executor.choose import Chosen
from jdisagg.executor.mesh_executor import MeshRole
from jdisagg.executor.programs import Programs
from jdisagg.executor.results import StepChoice
from jdisagg.layout.axes import Layout
from jdisagg.messages.step_commands import (
    NO_TOKEN,
    DecodeResult,
    DecodeSteps,
    PrefillChunk,
    PrefillResult,
    PrefillRow,
    SampleSpec,
    SlotAdmit,
)
from jdisagg.ops.parameters import layout_meshes
from jdisagg.request import SamplingParams
from tests.executor.meshes import executor
from tests.executor.prompts import wanted
from tests.shapes import CHUNK, LLAMA, SLOTS

GREEDY = SampleSpec(0, SamplingParams(temperature=0.0))
WIDTH = 128  # of the shipped model


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[jax.Array]:
    """What is copied from stage to stage."""
    seen: list[jax.Array] = []
    receive = Programs.receive

    def noted(self: Programs, array: jax.Array) -> jax.Array:
        seen.append(array)
        assert array.sharding.device_set.isdisjoint(self.mesh.devices.flat)
        return receive(self, array)

    monkeypatch.setattr(Programs, "receive", noted)
    return seen


@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 2, 2)])
def test_arrays_go_from_stage_to_stage_without_the_host(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = np.array(jax.devices()[: 2 * np.prod(shape)]).reshape(2, *shape)
    first, second = Programs(
        *(jax.sharding.Mesh(stage, ("dp", "kv", "rep")) for stage in devices)
    ).stages
    values = np.arange(shape[0] * 6, dtype=np.float32).reshape(shape[0], 2, 3)
    computed = jax.jit(lambda x: x + 1)(first.put(values))

    def host_view(_: jax.Array) -> np.ndarray:
        raise AssertionError("an array was read on the host")

    with monkeypatch.context() as patched, jax.transfer_guard_device_to_host("disallow_explicit"):
        patched.setattr(type(computed), "_value", property(host_view))
        patched.setattr(type(computed), "__array__", host_view)
        there = second.receive(computed)
    assert list(there.sharding.mesh.devices.flat) == list(devices[1].flat)  # type: ignore[attr-defined]
    assert np.array_equal(np.asarray(there), values + 1)


@dataclass(frozen=True)
class NamedDevice:
    """What a mesh asks of a device."""

    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        (Layout(pp=2, tp=2), [[0, 4], [1, 5]]),
        (Layout(pp=2, dp=2, tp=2), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (Layout(tp=4), [[0, 1, 4, 5]]),
    ],
)
def test_each_stage_has_devices_of_every_process_in_the_order_of_processes(
    layout: Layout, stages: list[list[int]]
) -> None:
    each = layout.devices // 2
    devices = [NamedDevice(4 * process + at, process) for process in range(2) for at in range(each)]
    meshes = layout_meshes(layout, 4, devices)  # type: ignore[arg-type]
    assert [[device.id for device in mesh.devices.flat] for mesh in meshes] == stages


def test_a_stage_that_cannot_have_devices_of_every_process_is_refused() -> None:
    devices = [NamedDevice(process, process) for process in range(2)]
    with pytest.raises(LayoutError, match="pp=2 over 2 processes: .*dp . tp = 1; choose a mult"):
        layout_meshes(Layout(pp=2), 4, devices)  # type: ignore[arg-type]


@pytest.mark.ci
async def test_activations_go_on_and_tokens_back_for_each_batch_and_nothing_else(
    received: list[jax.Array],
) -> None:
    """Slots 0 and 1 are of two batches. The tokens are those of a dense pass."""
    pages, prompt, steps = ((0, 1, 2), (4, 5, 6)), tuple(range(20, 45)), 3
    mesh = executor("d", "pp=2", MeshRole(True, True))
    try:
        rows = tuple(
            PrefillRow(slot, 0, 32 * slot, prompt, 0, pages[slot], (GREEDY,)) for slot in range(2)
        )
        chunk = await mesh.run(PrefillChunk(1, CHUNK, rows))
        assert isinstance(chunk, PrefillResult)
        assert [x.shape for x in received] == [(1, CHUNK, WIDTH)]
        received.clear()
        admits = tuple(
            SlotAdmit(slot, 0, slot, 9 + slot, 25, 33, pages[slot], GREEDY, slot)
            for slot in range(2)
        )
        result = await mesh.run(DecodeSteps(2, steps, ((1, 0),), admits=admits))
        assert isinstance(result, DecodeResult)
    finally:
        mesh.close()
    for slot, tokens in zip((1, 0), result.tokens[0], strict=True):
        likeliest = wanted(LLAMA, (*prompt, 9 + slot, *tokens)).argmax(-1)
        assert chunk.samples[slot].token == likeliest[len(prompt) - 1]
        assert tokens == tuple(likeliest[len(prompt) :][:steps])
    shapes = [array.shape for array in received]
    # Before its first step a batch has no tokens on the first stage.
    assert shapes.count((1, 1, WIDTH)) == 2 * steps
    assert shapes.count((1, SLOTS, 2)) == 2 * steps + 2
    assert len(shapes) == 4 * steps + 2


def test_the_choices_of_batches_are_read_in_the_order_of_the_steps_rows() -> None:
    """Two ranks; the first batch verified drafts, so that its rows have three tokens."""
    first = np.arange(12, dtype=np.int32).reshape(2, 2, 3)
    second = np.array([[[90]], [[91]]], np.int32)
    places = np.array([[2, 0, 1], [1, 2, 0]], np.int32)
    parts = tuple(Chosen(token, token[..., None]) for token in (first, second))  # type: ignore[arg-type]
    choice = StepChoice(parts, places)
    found = choice.read(0)
    assert found[0].tolist() == [[90, NO_TOKEN, NO_TOKEN], [0, 1, 2], [3, 4, 5]]
    assert found[1].tolist() == [[9, 10, 11], [91, NO_TOKEN, NO_TOKEN], [6, 7, 8]]
    assert choice.read(1).shape == (2, 3, 3, 1)
