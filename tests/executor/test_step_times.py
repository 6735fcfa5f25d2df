"""A mesh times programs that are warm: it measures its own sizes and compiles nothing."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from jdisagg.executor import step_times
from jdisagg.executor.mesh_executor import MeshExecutor, MeshRole
from jdisagg.executor.step_times import measure_step_times
from jdisagg.executor.warm_up import warm_up_steps
from tests.executor.meshes import executor
from tests.fakes.fake_executor import toy_limits


@pytest.mark.ci
@pytest.mark.parametrize(
    ("role", "chunks", "steps"),
    [
        (MeshRole(True, False, emit=True), [(64, 0), (64, 320)], []),
        pytest.param(MeshRole(False, True), [], [(1, 1), (4, 1), (4, 380)], marks=pytest.mark.slow),
    ],
)
def test_a_warm_mesh_measures_its_programs_without_compiling(role, chunks, steps) -> None:
    mesh = executor("m", "tp=1", role)
    try:
        for step in warm_up_steps(mesh):
            step()
        before = mesh.programs.compilations
        times = measure_step_times(mesh, role)
        assert mesh.programs.compilations == before
        assert [one[:2] for one in times.chunks] == chunks
        assert [one[:2] for one in times.steps] == steps
        assert all(one[2] > 0 for one in (*times.chunks, *times.steps))
        assert times.chunk_sizes == (mesh.limits.chunk_buckets if chunks else ())
        assert times.batch_sizes == (mesh.limits.batch_buckets if steps else ())
    finally:
        mesh.close()


@pytest.mark.parametrize(
    ("role", "context", "sizes"),
    [
        (MeshRole(True, False), 2048, [(64, 0), (128, 0), (128, 1024)]),
        (MeshRole(False, True), 2048, [(64, 0), (256, 0), (256, 1024)]),
        (MeshRole(False, True), 256, [(64, 0), (128, 0), (128, 128)]),
    ],
)
def test_the_largest_chunk_is_measured_where_it_is_small_and_leaves_room_for_earlier_tokens(
    role: MeshRole, context: int, sizes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = toy_limits(
        page_size=128, pages_per_rank=32, context_tokens=context, chunk_buckets=(64, 128, 256)
    )
    if role.decode:
        limits = replace(limits, append_buckets=limits.chunk_buckets)
    monkeypatch.setattr(step_times, "_seconds", lambda executor, chunk: 1.0)
    mesh = cast(MeshExecutor, SimpleNamespace(limits=limits))
    assert [one[:2] for one in measure_step_times(mesh, role).chunks] == sizes
