"""XLA's output for the executor's programs on an H200 and a GB200, without either: graphs,
host-driven loops, copies, memory. Skipped without JAX's CUDA plugin. Takes minutes per case.

`benchmarks/gpu_programs.py` compiles them in a separate process, because JAX here has eight strict
CPU devices.
"""

import pytest

from benchmarks.device_programs import Case, compiled_apart
from benchmarks.deviceless import missing
from jdisagg.layout.axes import Layout

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]

# a chunk's activations may be transposed (16.8 MB); a layer's pages have 268 MB, a feed-forward
# matrix 117 MB; elsewhere nothing but ids and rows is copied
CHUNK_BYTES, ROW_BYTES = 20_000_000, 1 << 20
# XLA makes a graph of five operations or more
SMALLEST_GRAPH = 5

CASES = [
    Case("h200", "llama-3-8b"),
    Case("gb200", "llama-3-8b", what="decode,blocks"),
    Case("h200", "llama-3-8b", kv_dtype="fp8"),
    Case("h200", "llama-3-8b", chunk=512, window=4096, what="decode,prefill"),
    Case("h200", "qwen3-30b-a3b", chunk=512, what="decode,prefill"),
    Case("gb200", "qwen3-30b-a3b", what="decode"),
    Case("h200", "gpt-oss-120b", chunk=512, what="prefill"),
    Case("h200", "gemma-4-31b", chunk=512, what="prefill"),
    Case("h200", "llama-3-8b", dtype="float32", chunk=512, what="prefill"),
    Case("h200", "llama-3-8b", "dp=1,tp=8", what="decode,blocks"),
    Case("h200", "qwen3-30b-a3b", "dp=4,tp=4,ep=16", what="decode"),
    Case("h200", "llama-3-8b", weights="int4", chunk=512, what="decode,prefill"),
    Case("h200", "llama-3-8b", weights="fp8", what="decode"),
    Case("h200", "qwen3-30b-a3b", weights="int4", what="decode"),
]


STAGED = Case("h200", "llama-3-8b", "pp=4", layers=4, what="decode,prefill")


@pytest.fixture(scope="module", params=CASES, ids=str)
def compiled(request: pytest.FixtureRequest) -> tuple[Case, list[dict]]:
    """Returns the case and the counts of each of its programs."""
    return request.param, compiled_apart(request.param)


def test_a_program_is_one_cuda_graph_and_the_host_drives_no_loop(compiled) -> None:
    """With collectives, one graph between each two: XLA 0.11 does not put them into a graph."""
    for program in compiled[1]:
        small = program["kernels"] + program["copies"] < SMALLEST_GRAPH
        graphs = (
            range(program["collectives"] + 2) if program["collectives"] else [0 if small else 1]
        )
        assert program["graphs"] in graphs, program
        assert program["whiles"] == 0, program
        assert program["conditionals"] == 0, program


def test_pages_are_written_in_place(compiled) -> None:
    case, programs = compiled
    layout, config = Layout.parse(case.layout), case.config()
    spec = config.kv_spec(case.dtype)
    shards = layout.mesh_shape(config.attention.kv_heads)[1]
    pool_bytes = case.pages * case.page * spec.bytes_per_token // shards
    writers = [p for p in programs if p["program"].startswith(("step", "group", "insert", "copy"))]
    assert len(writers) >= 3
    for program in writers:
        assert program["alias_bytes"] >= pool_bytes, program


def test_no_program_copies_pages_or_weights(compiled) -> None:
    for program in compiled[1]:
        # the choice of tokens gathers the logits
        gathers = program["program"].startswith(("step", "head")) and program["collectives"]
        chunk = program["program"].startswith("group") or gathers
        assert program["copied_bytes"] < (CHUNK_BYTES if chunk else ROW_BYTES), program


def test_what_a_step_needs_beside_its_arguments_is_small(compiled) -> None:
    for program in compiled[1]:
        gathers = program["program"].startswith(("step", "head")) and program["collectives"]
        most = 400e6 if program["program"].startswith("group") or gathers else 100e6
        assert program["temp_bytes"] < most, program


def test_stages_send_activations_to_the_next_stage_and_tokens_back_alone() -> None:
    """No program of a stage exchanges anything, and the host drives no loop."""
    found = compiled_apart(STAGED)
    copies = [line for line in found if "source" in line]
    programs = [line for line in found if "program" in line]
    assert {line["program"].split()[1] for line in programs} == {"0", "1", "2", "3"}
    for program in programs:
        assert program["whiles"] == program["conditionals"] == program["collectives"] == 0, program
        assert program["graphs"] <= 1, program
    tokens = [copy for copy in copies if copy["copied_bytes"] == 8 * STAGED.slots]
    assert {(copy["source"], copy["target"]) for copy in tokens} == {(3, 0), (3, 1), (3, 2)}
    activations = [copy for copy in copies if copy not in tokens]
    assert {(copy["source"], copy["target"]) for copy in activations} == {(0, 1), (1, 2), (2, 3)}
    row_bytes = 2 * 4096
    sizes = {copy["copied_bytes"] for copy in activations}
    assert sizes == {STAGED.batch * row_bytes, STAGED.chunk * row_bytes}
