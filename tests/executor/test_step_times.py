"""A mesh times programs that are warm: it measures its own sizes and compiles nothing."""

import pytest

from jdisagg.executor.mesh_executor import MeshRole
from jdisagg.executor.step_times import measure_step_times
from jdisagg.executor.warm_up import warm_up_steps
from tests.executor.meshes import HandChannel, executor


@pytest.mark.ci
@pytest.mark.parametrize(
    ("role", "chunks", "steps"),
    [
        (MeshRole(True, False, emit=True), [(64, 0), (64, 192)], []),
        (MeshRole(False, True), [], [(1, 1), (2, 1), (2, 252)]),
    ],
)
def test_a_warm_mesh_measures_its_programs_without_compiling(role, chunks, steps) -> None:
    mesh = executor("m", "tp=1", role, HandChannel(), 0, page=16, dtype="float32")
    try:
        for step in warm_up_steps(mesh):
            step()
        before = mesh.programs.compilations
        times = measure_step_times(mesh)
        assert mesh.programs.compilations == before
        assert [one[:2] for one in times.chunks] == chunks
        assert [one[:2] for one in times.steps] == steps
        assert all(one[2] > 0 for one in (*times.chunks, *times.steps))
        assert times.chunk_sizes == (mesh.limits.chunk_buckets if chunks else ())
        assert times.batch_sizes == (mesh.limits.batch_buckets if steps else ())
    finally:
        mesh.close()
