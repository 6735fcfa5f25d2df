"""XLA's output for the executor's programs on TPUs, without one: loops, copies, memory. Skipped
without libtpu. Takes minutes per case.

`benchmarks/tpu_programs.py` compiles them in a separate process."""

from typing import Any

import pytest

from benchmarks.device_programs import Case, compiled_apart
from benchmarks.deviceless import missing
from benchmarks.tpu_devices import TPU_DEVICES
from jdisagg.layout.axes import Layout

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing("tpu")), reason=missing("tpu"))]

CASES = [
    Case("v6e", "llama-3-8b", what="decode,updates,blocks,prefill"),
    Case("v6e", "llama-3-8b", "dp=1,tp=8", what="decode,updates,blocks"),
    Case("v6e", "gpt-oss-20b", what="decode,updates,blocks"),
    Case("v6e", "deepseek-v3", "dp=16,tp=1,ep=16", what="decode,updates,blocks,prefill"),
    Case("tpu7x", "llama-3-8b", what="decode,updates,blocks"),
]
LANES = 128


@pytest.fixture(scope="module", params=CASES, ids=str)
def compiled(request: pytest.FixtureRequest) -> tuple[Case, list[dict[str, Any]]]:
    """Returns the case and the counts of each of its programs."""
    return request.param, compiled_apart(request.param)


def page_bytes(case: Case, *, padded: bool) -> list[int]:
    """Returns the bytes of each component of the pages on a device, layer by layer."""
    spec = case.config().kv_spec(case.dtype)
    shards = Layout.parse(case.layout).mesh_shape(case.config().kv_heads)[1]
    width = lambda part: -(-part.width // LANES) * LANES if padded else part.width  # noqa: E731
    return [
        case.pages * case.page * max(1, part.heads // shards) * width(part) * 2
        for layer in spec.layers
        for part in layer.components
    ]


def test_no_program_copies_pages_or_weights(compiled) -> None:
    case, programs = compiled
    component = min(page_bytes(case, padded=False))
    for program in programs:
        assert program["copied_bytes"] < component / 2, program
        if program["program"].startswith(("insert kv", "extract kv", "copy")):
            assert program["prefetched_bytes"] < component / 2, program


def test_pages_are_written_in_place(compiled) -> None:
    """Layers with a window lie in rings in a decode step, so their pages are left out."""
    case, programs = compiled
    windowed = any(layer.window for layer in case.config().layers)
    parts = page_bytes(case, padded=True)
    writers = [
        program
        for program in programs
        if program["program"].startswith(("step", "group", "insert kv", "copy kv"))
    ]
    assert len(writers) >= 3
    for program in writers:
        assert program["alias_bytes"] >= (max(parts) if windowed else sum(parts)), program


def test_blocks_are_moved_without_loops(compiled) -> None:
    moved = [p for p in compiled[1] if p["program"].startswith(("insert", "extract", "copy"))]
    assert len(moved) >= 3
    assert not [program for program in moved if program["whiles"]]


def test_a_decode_step_needs_little_beside_its_arguments(compiled) -> None:
    case, programs = compiled
    config = case.config()
    logits = 4 * case.batch * config.vocabulary
    steps = [program for program in programs if program["program"].startswith("step")]
    assert steps
    for program in steps:
        experts = 2 * 64e6 if "deepseek" in case.model else 0  # rows of all ranks, for each expert
        assert program["temp_bytes"] < max(64e6, logits) + experts, program
        assert program["whiles"] <= case.layers, program


def test_a_decode_step_moves_little_more_than_its_weights(compiled) -> None:
    case, programs = compiled
    bandwidth = TPU_DEVICES[case.device].memory_bandwidth
    for program in programs:
        if program["program"].startswith("step"):
            assert program["memory_bytes"] / bandwidth < 1.5 * program["roof_seconds"], program
