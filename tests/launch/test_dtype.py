"""A checkpoint of one's own is served in the type that its config.json states."""

import json
from pathlib import Path

import pytest

from launch.flags import ENGINE, define
from launch.settings import engine_config


def _dtype(directory: Path, *words: str) -> str:
    flags = define(*ENGINE)
    flags.values(["page", f"--model={directory}", *words])
    return engine_config(flags).model.dtype


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "bfloat16"),
        ({"dtype": "float32"}, "float32"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({}, "float32"),
    ],
)
def test_the_type_is_the_checkpoints_own(
    tmp_path: Path, fields: dict[str, object], dtype: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert _dtype(tmp_path) == dtype


def test_a_type_that_is_named_wins(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    assert _dtype(tmp_path, "--dtype=float32") == "float32"
    assert _dtype(tmp_path, "--set=model.dtype=float32") == "float32"
