"""The form of embeddings that a folder's files of sentence-transformers state."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jdisagg.errors import CheckpointError, InvalidRequestError
from jdisagg.prompt.embedding import EmbeddingForm
from jdisagg.prompt.logprobs import LAST, SUM, PromptLogprobs

ST = "sentence_transformers.models."
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": f"{ST}Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{ST}Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{ST}Normalize"},
]
OLD = {"word_embedding_dimension": 8, "pooling_mode_cls_token": False, "include_prompt": True}


def folder(
    path: Path, modules: list[Any], pooling: dict[str, Any], own: dict[str, Any] | None = None
) -> EmbeddingForm | None:
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if own is not None:
        (path / "config_sentence_transformers.json").write_text(json.dumps(own))
    return EmbeddingForm.from_directory(path)


@pytest.mark.parametrize(
    ("pooling", "wanted"),
    [
        (OLD | {"pooling_mode_lasttoken": True}, "last"),
        (OLD | {"pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_pooling_is_as_the_folder_says(
    tmp_path: Path, pooling: dict[str, Any], wanted: str
) -> None:
    found = folder(tmp_path, MODULES, pooling)
    assert found == EmbeddingForm(wanted, True)
    plain = folder(tmp_path, MODULES[:2], pooling)
    assert plain == EmbeddingForm(wanted, False)
    assert folder(tmp_path, [MODULES[0], MODULES[2]], {}) == EmbeddingForm("last", True)


def test_a_folder_without_modules_makes_no_embeddings(tmp_path: Path) -> None:
    assert EmbeddingForm.from_directory(tmp_path) is None


def test_prompts_have_names(tmp_path: Path) -> None:
    own = {"prompts": {"query": "Find: ", "document": ""}, "default_prompt_name": None}
    form = folder(tmp_path, MODULES, {"pooling_mode": "mean"}, own)
    assert form is not None and form.prompt("query") == "Find: "
    assert form.prompt(None) == form.prompt("") == ""
    with pytest.raises(InvalidRequestError, match="prompt_name='answer' is not a prompt"):
        form.prompt("answer")
    named = folder(
        tmp_path, MODULES, {"pooling_mode": "mean"}, own | {"default_prompt_name": "query"}
    )
    assert named is not None and named.prompt(None) == "Find: "


REFUSED: list[tuple[list[Any], dict[str, Any], str]] = [
    ([*MODULES, {"type": f"{ST}Dense", "path": "3_Dense"}], {"pooling_mode": "mean"}, "'Dense'"),
    (MODULES, OLD | {"pooling_mode_max_tokens": True}, "pooling by max_tokens"),
    (MODULES, OLD, "pooling by nothing"),
    (
        MODULES,
        OLD | {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True},
        "by mean_tokens and lasttoken",
    ),
    (MODULES, {"pooling_mode": "mean", "include_prompt": False}, "include_prompt=false"),
]


@pytest.mark.parametrize(("modules", "pooling", "words"), REFUSED)
def test_another_form_is_refused(
    tmp_path: Path, modules: list[Any], pooling: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        folder(tmp_path, modules, pooling)


def hidden(top: int, *values: float) -> PromptLogprobs:
    return PromptLogprobs(top, hidden=np.array(values, np.float32).tobytes())


def test_vectors_are_cut_before_they_are_normalized() -> None:
    state = hidden(LAST, 3.0, 4.0, 12.0)
    assert EmbeddingForm("last", False).vector(state, 7, None).tolist() == [3, 4, 12]
    unit = EmbeddingForm("last").vector(state, 7, None)
    assert unit.tolist() == pytest.approx([3 / 13, 4 / 13, 12 / 13])
    cut = EmbeddingForm("last", False).vector(state, 7, 2)
    assert cut.tolist() == pytest.approx([0.6, 0.8])
    for dimensions in (0, 4):
        with pytest.raises(InvalidRequestError, match=r"dimensions must be in \[1, 3\]"):
            EmbeddingForm("last").vector(state, 7, dimensions)
    zero = EmbeddingForm("last").vector(hidden(LAST, 0.0, 0.0), 1, None)
    assert zero.tolist() == [0, 0]


def test_the_sums_of_the_parts_of_a_prompt_are_added() -> None:
    parts = [hidden(SUM, 1.0, 2.0), hidden(SUM, 3.0, 4.0), hidden(SUM, 5.0, 6.0)]
    whole = PromptLogprobs.joined(parts)
    assert EmbeddingForm("mean", False).vector(whole, 4, None).tolist() == [9 / 4, 12 / 4]
