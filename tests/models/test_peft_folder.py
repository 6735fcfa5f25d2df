"""Folders of LoRA adapters in PEFT's format: what is refused by name, scales, and the digest."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jdisagg.errors import InvalidRequestError
from models.peft_folder import adapter_digest, check_adapter, read_factors, read_peft_config
from tests.end_to_end.adapters import write_adapter
from tests.end_to_end.clusters import LLAMA
from tests.models.configs import not_refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", LLAMA, 1, modules=("q_proj",))


def configure(folder: Path, **fields: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


CHANGES: list[tuple[str, object]] = [
    ("use_dora", True),
    ("modules_to_save", ["lm_head"]),
    ("layer_replication", [[0, 2], [1, 3]]),
    ("lora_bias", True),
    ("trainable_token_indices", [1]),
    ("alora_invocation_tokens", [3]),
    ("use_qalora", True),
    ("use_bdlora", True),
    ("bias", "all"),
    ("fan_in_fan_out", True),
    ("peft_type", "IA3"),
    ("task_type", "SEQ_CLS"),
    ("init_lora_weights", "pissa_niter_4"),
    ("init_lora_weights", "olora"),
    ("r", 0),
    ("lora_alpha", "two"),
    ("rank_pattern", ["q_proj"]),
    ("alpha_pattern", {"(": 2}),
    ("a_field_of_the_future", True),
]


def test_a_field_that_changes_the_computation_is_refused_by_name(folder: Path) -> None:
    assert len(check_adapter(str(folder))) == 64
    plain = (folder / "adapter_config.json").read_text()

    def check(fields: dict[str, object]) -> None:
        (folder / "adapter_config.json").write_text(plain)
        configure(folder, **fields)
        check_adapter(str(folder))

    rows = ((field, {field: value}) for field, value in CHANGES)
    assert not_refused(check, rows, InvalidRequestError) == []


def test_fields_that_change_nothing_are_accepted(folder: Path) -> None:
    configure(
        folder,
        target_modules="all-linear",
        layers_to_transform=[0],
        exclude_modules=["k_proj"],
        lora_dropout=0.1,
        init_lora_weights="gaussian",
        a_field_of_the_future=None,
    )
    check_adapter(str(folder))


def test_the_scale_is_that_of_the_first_pattern_that_matches_the_end_of_the_name(
    folder: Path,
) -> None:
    configure(
        folder,
        r=8,
        lora_alpha=16,
        rank_pattern={"q_proj": 4, r"layers\.1\.self_attn\.q_proj": 2},
        alpha_pattern={r"layers\.0\..*": 6},
    )
    config = read_peft_config(folder)
    assert config.scale_of("model.layers.0.self_attn.q_proj") == 6 / 4
    assert config.scale_of("model.layers.1.self_attn.q_proj") == 16 / 4
    assert config.scale_of("model.layers.1.self_attn.eq_proj") == 16 / 8, "a part of a name"
    configure(folder, use_rslora=True, rank_pattern={}, alpha_pattern={})
    assert read_peft_config(folder).scale_of("model.layers.1.mlp.up_proj") == 16 / 8**0.5


def test_tensors_that_are_no_factors_of_matrices_are_refused_by_name(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(iter(tensors))
    for extra in ("base_model.model.lm_head.weight", f"{name}.lora_magnitude_vector"):
        save_file({**tensors, extra: np.zeros((2, 2), np.float32)}, path)
        with pytest.raises(InvalidRequestError, match="is not a factor"):
            read_factors(folder)
    save_file({key: value for key, value in tensors.items() if key != name}, path)
    with pytest.raises(InvalidRequestError, match="needs lora_A .* and lora_B"):
        read_factors(folder)
    path.write_bytes(b"nonsense")
    with pytest.raises(InvalidRequestError, match="not a safetensors file"):
        read_factors(folder)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_factors_that_are_not_finite_are_refused(folder: Path, broken: float) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    for name, factor in tensors.items():
        changed = factor.copy()
        changed[-1, -1] = broken
        save_file({**tensors, name: changed}, path)
        with pytest.raises(InvalidRequestError, match="'model.layers.* not finite"):
            check_adapter(str(folder))


def test_the_digest_is_that_of_the_content_wherever_it_lies(folder: Path, tmp_path: Path) -> None:
    again = write_adapter(tmp_path / "again", LLAMA, 1, modules=("q_proj",))
    other = write_adapter(tmp_path / "other", LLAMA, 2, modules=("q_proj",))
    assert adapter_digest(folder) == adapter_digest(again) != adapter_digest(other)
    configure(again, lora_alpha=3)
    assert adapter_digest(folder) != adapter_digest(again)
    with pytest.raises(InvalidRequestError, match="adapter_config.json cannot be read"):
        adapter_digest(tmp_path / "nowhere")
