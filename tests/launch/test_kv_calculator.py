"""The KV calculator as a user meets it: a table on stdout, or one line that says what is wrong."""

from pathlib import Path

from launch.shipped import SHIPPED_MODEL
from tests.launch.script_ends import ends, not_refused


def test_a_prompt_of_a_model_is_priced_on_each_link() -> None:
    priced, in_fp8, directory = ends(
        "kv_calculator",
        (
            *("--model=llama-3-70b", "--prompt_tokens=1000"),
            *("--tokens_per_second=10000", "--links=infiniband-ndr,pcie5"),
        ),
        ("--model=llama-3-70b", "--kv_dtype=fp8", "--links=pcie5"),
        (f"--model={SHIPPED_MODEL}", "--dtype=float32", "--hardware=a100"),
    )
    for end in (priced, in_fp8, directory):
        assert (end.status, end.err) == (0, "")
    out = priced.out
    assert "327,680 bytes (2 x 80 layers x 8 KV heads x 128 x 2 bytes)" in out
    assert "3.28 GB/s" in out
    # 327.68 MB at 45 GB/s, and 3.2768 of 45 GB/s
    row = next(line for line in out.splitlines() if "infiniband-ndr" in line).split()
    assert row == ["infiniband-ndr", "50", "45", "7.29", "7.3", "%"]
    assert "pcie5" in out and "nvlink" not in out
    assert "163,840 bytes (2 x 80 layers x 8 KV heads x 128 x 1 bytes)" in in_fp8.out
    assert "2,048 bytes (2 x 4 layers x 4 KV heads x 16 x 4 bytes)" in directory.out
    assert "on 1 a100" in directory.out


def test_bad_input_is_one_line_that_names_it(tmp_path: Path) -> None:
    rows = [
        ("--model=nope", "no model named 'nope'"),
        (
            "--model=opt-13b --prompt_tokens=0",
            "--prompt_tokens must be within 1 and the model's context of 2048, got 0",
        ),
        ("--model=opt-13b --prompt_tokens=4096", "context of 2048, got 4096"),
        ("--model=opt-13b --links=string", "no link named 'string'"),
        ("--model=opt-13b --kv_dtype=fp8 --codec=int8", "--kv_dtype=fp8 keeps them in one"),
        ("--model=opt-13b --hardware=l40s --layout=tp=3", "layout tp=3 does not divide"),
    ]
    for number, content in enumerate(("{", "[1]", '{"hidden_size": 8}')):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "config.json").write_text(content)
        rows.append((f"--model={tmp_path / str(number)}", "config.json"))
    rows.append(("--model=opt-13b --codec=zip", "--codec=zip: value should be one of"))
    given = [(tuple(flags.split()), said) for flags, said in rows]
    assert not_refused("kv_calculator", given, lambda said: 1 + ("zip" in said)) == []
