"""How `benchmarks.deviceless` parses XLA's dumps, with texts from two JAX versions. Needs no
plugin."""

import sys
from pathlib import Path

import pytest

from benchmarks.deviceless import count_thunks, largest_copy
from benchmarks.gpu_programs import main

THUNKS = """\
000: kCommandBuffer
  000: kKernel
  001: kCopy
  002: kGemm
001: kWhile
  002: kKernel
003: kConditional
004: kAllReduceStart
005: kAllReduceDone
006: kDeviceToDeviceCopy
007: kCuDnn
"""


def test_what_the_host_does_is_told_from_what_a_graph_does(tmp_path: Path) -> None:
    (tmp_path / "module_0001.thunk_sequence_after_thunk_passes.txt").write_text(THUNKS)
    assert count_thunks(tmp_path) == {
        "graphs": 1,
        "whiles": 1,
        "kernels": 4,
        "copies": 2,
        "collectives": 1,
        "conditionals": 1,
    }


def test_a_dump_of_another_form_is_no_program_without_loops(tmp_path: Path) -> None:
    (tmp_path / "module_0001.thunks_in_some_new_form.txt").write_text(THUNKS)
    with pytest.raises(RuntimeError, match="thunks_in_some_new_form"):
        count_thunks(tmp_path)


def test_what_cannot_be_compiled_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = "encode is none of decode, drafts, pair, updates, prefill, blocks"
    for word, said in (
        ("--what=decode,encode", known),
        ("--batch=129", "--batch=129 must be in [1, 128]"),
        ("--batch=0", "--batch=0 must be in [1, 128]"),
    ):
        monkeypatch.setattr(sys, "argv", ["gpu_programs", word])
        with pytest.raises(SystemExit):
            main()
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["gemm_fusion_dot.1", "fused_computation.gemm_fusion_dot.1"])
def test_a_transposition_within_a_fused_product_writes_nothing_down(name: str) -> None:
    inside = "  %transpose.5 = bf16[4,1024,14336]{1,0,2} transpose(%convert.4), dimensions={2,0,1}"
    fused = f"%{name}_computation (p: s4[1024,14336,4]) -> f32[4,32,14336] {{\n{inside}\n}}"
    other = (
        "%fused_copy (p: f32[8,16]) -> f32[16,8] {\n  %copy.1 = f32[16,8]{0,1} copy(%p)\n}\n\n"
        "ENTRY %main () -> s4[64] {\n  %copy.2 = s4[64]{0} copy(%x)\n}"
    )
    assert largest_copy(f"{fused}\n\n{other}") == 16 * 8 * 4
