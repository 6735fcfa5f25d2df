"""The page that finds scales of KV: what it writes is what a model is then loaded with, and what it
cannot do it says."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jdisagg.layout.kv_spec import KV_SCALES_FILE
from launch.calibrate_kv import DEFAULT_TEXT, SEQUENCE_TOKENS, sequences
from launch.shipped import SHIPPED_MODEL
from models.checkpoint import load_kv_scales
from models.tokenizer import Tokenizer
from tests.launch.script_ends import ends, not_refused

TOKENIZER = Tokenizer.from_directory(SHIPPED_MODEL)


def test_a_text_is_cut_into_sequences_that_begin_as_a_text_does() -> None:
    text = DEFAULT_TEXT.read_text(encoding="utf-8")
    found = sequences(TOKENIZER, text, 1100)
    opening = TOKENIZER.encode("")
    assert opening and all(ids[: len(opening)] == opening for ids in found)
    plain = [token for ids in found for token in ids[len(opening) :]]
    assert len(found) == 2 and len(plain) == 2 * SEQUENCE_TOKENS
    assert plain == TOKENIZER.encode(text, add_special_tokens=False)[: len(plain)]
    (short,) = sequences(TOKENIZER, "Once upon a time", 1100)
    assert short == TOKENIZER.encode("Once upon a time")
    assert [len(ids) for ids in sequences(TOKENIZER, text, 7)] == [7 + len(opening)]


@pytest.mark.ci
def test_what_it_writes_is_what_is_loaded(tmp_path: Path) -> None:
    model = Path(shutil.copytree(SHIPPED_MODEL, tmp_path / "model"))
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a girl. " * 9)
    none, done, again = (
        *ends("inspect", (f"--model={model}", "--kv_dtype=fp8")),
        *ends("calibrate_kv", (f"--model={model}", f"--text={text}", "--layout=tp=2")),
        *ends("inspect", (f"--model={model}", "--kv_dtype=fp8")),
    )
    assert "KV scales       none; `jdisagg calibrate_kv`" in none.out
    assert done.status == 0, done.err
    assert f"KV scales       {KV_SCALES_FILE}\n" in again.out
    stated = json.loads((model / KV_SCALES_FILE).read_text())
    assert stated["of"].endswith("tokens of text.txt")
    scales, origin = load_kv_scales(model)
    assert origin == KV_SCALES_FILE and len(scales) == len(stated["layers"]) == 4
    for ours, layer in zip(scales, stated["layers"], strict=True):
        for name in ("k", "v"):
            room = 2 * np.array(layer[name]["largest"]) / ours[name]
            assert ((room > 223) & (room <= 448.5)).all(), "to the four digits that are written"
    assert done.out.splitlines()[-2] == "none goes beyond 448, where e4m3 ends"


def test_what_cannot_be_is_said_in_one_line(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    rows = (
        ("--text=/nowhere", "--text=/nowhere cannot be read"),
        (f"--text={empty}", "the text has no tokens; "),
        (f"--output={empty}/x.json", "--output: folder "),
    )
    given = (((f"--model={SHIPPED_MODEL}", flag), said) for flag, said in rows)
    assert not_refused("calibrate_kv", given) == []
