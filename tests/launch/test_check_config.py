"""A configuration is checked before anything is started: all that is wrong is named, and what fits
is said with its bytes."""

from pathlib import Path

from tests.launch.script_ends import ROOT, ends

GOLDEN = ROOT / "tests" / "golden"
SIZE = "--device_gib=80"


def test_what_can_be_served_is_said_and_all_that_is_wrong_is_named(tmp_path: Path) -> None:
    tokens = tmp_path / "none"
    good, here, layouts, state, small, family = ends(
        "check_config",
        (SIZE, "--prefill=tp=2", "--decode=dp=2"),
        ("--prefill=tp=2", "--decode=dp=2"),
        (SIZE, "--prefill=tp=3", "--decode=dp=2", f"--token_file={tokens}"),
        (SIZE, f"--model={GOLDEN / 'qwen3_5'}", "--prefix_cache", "--decode=dp=2"),
        ("--device_gib=0.001", "--prefill=tp=2", "--decode=dp=2"),
        (SIZE, f"--model={_unknown(tmp_path)}"),
    )
    for end in (good, here):
        verdict, *plans = end.out.splitlines()
        assert end.status == 0 and len(plans) == 2, end
        assert verdict.startswith("can be served: ")
        assert verdict.endswith("llama/config.json, disaggregated, 4 devices")
        assert plans[0].startswith("prefill (dp=1,tp=2,ep=1), each device: ")
    assert "(of 80 GiB)" in good.out and "(0.5 of " in here.out
    assert layouts.status == 1 and layouts.out.count("problem: ") == 2
    assert f"cannot read '{tokens}'" in layouts.out
    assert "prefill: layout tp=3 does not divide the model's 4 kv heads" in layouts.out
    assert state.status == 0 and "sequence states" in state.out
    assert small.status == 1 and "does not fit, prefill (dp=1,tp=2,ep=1)" in small.out
    assert family.status == 1 and "cannot be served: the family 'sphinx'" in family.out
    assert not any(end.err for end in (good, here, layouts, state, small, family))


def _unknown(folder: Path) -> Path:
    text = (GOLDEN / "qwen3" / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"qwen3"', '"sphinx"'))
    return folder
