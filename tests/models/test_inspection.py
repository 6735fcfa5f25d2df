"""The inspection of a checkpoint agrees with loading it."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jdisagg.layout.axes import Layout
from launch.shipped import SHIPPED_MODEL
from models.checkpoint import load_model
from models.inspection import bytes_per_device, inspect, kv_by_kind, layers_by_kind
from tests.launch.script_ends import ends

GOLDEN = Path(__file__).parent.parent / "golden"


def _changed(directory: Path, to: Path, **fields: object) -> Path:
    shutil.copytree(directory, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | fields))
    return to


# Bytes of KV of a token and of a sequence's state, on one device in float32.
OF_A_DEVICE: list[tuple[str, str, int, int]] = [
    ("llama_tied", "tp=2", 2 * 2 * 1 * 8 * 4, 0),
    ("qwen3_moe", "dp=2,tp=2,ep=4", 2 * 3 * 1 * 12 * 4, 0),
    ("llama_tied", "tp=4", 2 * 2 * 1 * 8 * 4, 0),
    ("deepseek_v3", "tp=4", 3 * (20 + 6) * 4, 0),  # every device has the whole of it
    # two layers have KV, two state: three inputs, a matrix a value head
    (
        "qwen3_next",
        "tp=4",
        2 * 2 * 1 * 16 * 4,
        2 * (3 * (2 * 2 * 8 + 4 * 12) + 4 * 8 * 12) * 4 // 2,
    ),
    # of three layers one has KV, two state: of two heads each, and of both heads' shared part
    ("granite4_moe", "tp=4", 2 * 8 * 4, 2 * (2 * (2 * 16 + 12 * 16) + 2 * 2 * 12) * 4),
    # one layer has latents, three have state: half of four heads
    ("kimi_linear", "tp=4", (20 + 6) * 4, 3 * 2 * (3 * 3 * 8 + 8 * 8) * 4),
    # half of the keys and values, and in three layers a whole index key
    ("minimax_m3", "tp=2", (4 * 2 * 12 + 3 * 8) * 4, 0),
    # one of four layers has KV; tp=4 keeps one of two heads twice
    ("lfm2", "tp=4", 2 * 8 * 4, 3 * 2 * 16 * 4),
    # one of three layers has KV, two state: of two of the four heads
    ("minimax", "tp=4", 2 * 12 * 4, 2 * 2 * 12 * 12 * 4),
]


def test_bytes_of_a_device_are_those_that_it_holds() -> None:
    for name, layout, a_token, a_state in OF_A_DEVICE:
        config, parsed = inspect(GOLDEN / name).config, Layout.parse(layout)
        assert config is not None
        model = load_model(GOLDEN / name, parsed, jax.devices()[: parsed.devices]).model
        arrays = jax.tree.leaves(nnx.state(model))
        held = sum(array.addressable_shards[0].data.nbytes for array in arrays)
        assert bytes_per_device(config, parsed, "float32") == (held, a_token, a_state), name


KINDS: dict[str, list[tuple[str, int]]] = {
    "qwen2_windows": [("full attention, dense", 1), ("window of 9, dense", 1)],
    "granite4_moe": [("Mamba-2, 2 of 6 experts", 2), ("full attention, 2 of 6 experts", 1)],
    "minimax_m3": [
        ("full attention, dense", 1),
        ("attention to 3 blocks of 8 positions, 2 of 8 experts", 3),
    ],
    "lfm2": [("short convolution, dense", 3), ("full attention, dense", 1)],
    "minimax": [("lightning attention, 2 of 4 experts", 2), ("full attention, 2 of 4 experts", 1)],
    "kimi_linear": [
        ("Kimi Delta Attention, dense", 1),
        ("full attention to latents of 20 + 6, 2 of 8 experts", 1),
        ("Kimi Delta Attention, 2 of 8 experts", 2),
    ],
    "nemotron_h": [
        ("Mamba-2, nothing else", 2),
        ("dense feed-forward, nothing else", 2),
        ("full attention, nothing else", 1),
    ],
}


def test_layers_are_counted_by_kind() -> None:
    configs = {name: inspect(GOLDEN / name).config for name in KINDS}
    assert {name: layers_by_kind(each) for name, each in configs.items() if each} == KINDS


def test_all_that_is_missing_is_named(tmp_path: Path) -> None:
    directory = _changed(
        GOLDEN / "llama_tied",
        tmp_path / "model",
        hidden_act="gelu",
        quantization_config={"quant_method": "fp8"},
        final_logit_softcapping=30.0,
    )
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, directory / "model.safetensors")
    found = inspect(directory)
    said = "\n".join(found.missing)
    assert found.quantization == "fp8"  # which is read
    for word in ("hidden_act", "final_logit_softcapping", "model.norm"):
        assert word in said


def test_a_checkpoint_quantized_in_an_unknown_form_does_not_load(tmp_path: Path) -> None:
    stated = {"quant_method": "exl3", "bits": 4}
    directory = _changed(GOLDEN / "mistral3", tmp_path / "model", quantization_config=stated)
    found = inspect(directory)
    assert found.quantization == "exl3 4" and "quant_method must be one of" in found.missing[0]


def test_a_drafter_is_checked_with_a_config_alone() -> None:
    drafter = str(GOLDEN / "assistants/clusters")
    for at in ("gemma4_clusters/config.json", "gemma4_clusters"):
        found = inspect(GOLDEN / at, drafter)
        assert not found.missing and found.drafter.startswith("assistant, ")
    for at in ("llama_tied/config.json", "llama_tied"):
        (said,) = inspect(GOLDEN / at, drafter).missing
        assert "the model must be a Gemma 4" in said


def test_a_family_that_is_not_served_is_named_with_what_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    fields = json.loads((GOLDEN / "llama_tied/config.json").read_text())
    path.write_text(json.dumps(fields | {"model_type": "stablelm", "logit_scale": 0.25}))
    found = inspect(path)
    assert found.missing[0] == "the family 'stablelm'" and "logit_scale" in found.missing[1]


def test_a_model_that_sees_of_such_a_family_is_named_with_what_its_text_part_needs(
    tmp_path: Path,
) -> None:
    text = {"hidden_size": 2816, "num_hidden_layers": 30, "num_attention_heads": 16}
    text |= {"vocab_size": 262144, "intermediate_size": 2112, "head_dim": 256}
    text |= {"global_head_dim": 512, "attention_k_eq_v": True, "num_kv_shared_layers": 0}
    path = tmp_path / "config.json"
    whole = {"model_type": "gemma9", "text_config": {"model_type": "gemma9_text", **text}}
    path.write_text(json.dumps(whole))
    found = inspect(path)
    assert found.missing == [
        "the family 'gemma9'",
        "global_head_dim=512 (heads of another size in some layers)",
        "attention_k_eq_v=True (keys that also serve as values)",
    ]


def test_layers_of_several_sizes_are_told_apart_with_what_each_keeps_of_a_token() -> None:
    config = inspect(GOLDEN / "gemma4/config.json").config
    assert config is not None
    windowed, full = "window of 9 with 4 kv heads of 12", "full attention with 2 kv heads of 20"
    assert kv_by_kind(config, "bfloat16") == {
        f"{windowed}, dense": 2 * 4 * 12 * 2,
        f"{full}, dense": 2 * 2 * 20 * 2,
    }
    routed = inspect(GOLDEN / "gemma4_moe/config.json").config
    assert routed is not None
    assert layers_by_kind(routed)[0][0].endswith("3 of 8 experts beside a dense block")


def test_tensors_of_a_type_that_is_not_read_are_named(tmp_path: Path) -> None:
    directory = _changed(GOLDEN / "llama_tied", tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].astype(np.int8)}, directory / "model.safetensors")
    assert f"1 tensors of an unsupported type: {name} (I8)" in inspect(directory).missing[0]


def test_the_page_ends_with_whether_it_loads(tmp_path: Path) -> None:
    config = _changed(GOLDEN / "llama_tied", tmp_path / "model", clip_qkv=8.0) / "config.json"
    good, layout, bad = ends(
        "inspect",
        (f"--model={SHIPPED_MODEL}", "--layout=tp=2"),
        (f"--model={SHIPPED_MODEL}", "--layout=tp=3"),
        (f"--model={config}",),
    )
    assert (good.status, good.err) == (0, "")
    assert good.out.splitlines()[0].split() == ["loads", "yes"]
    assert layout.status == 1 and "layout tp=3 does not divide" in layout.out
    assert bad.status == 1 and "clip_qkv=8.0 (clipped" in bad.out


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("model_type", {"a": 1}, "the family"),
        ("num_hidden_layers", 10**30, "must be at most 10000"),
    ],
)
def test_a_field_that_is_nonsense_is_named(
    field: str, value: object, said: str, tmp_path: Path
) -> None:
    found = inspect(_changed(GOLDEN / "llama_tied", tmp_path / "model", **{field: value}))
    assert said in found.missing[0]


def test_an_inspection_says_which_parser_reads_the_calls_of_the_model(tmp_path: Path) -> None:
    directory = _changed(SHIPPED_MODEL, tmp_path / "model")
    for template, said in (
        ("{{ tools }}<tool_call>", "a chat template, for tool calls the parser hermes"),
        ("{{ tools }}", "a chat template, for tool calls no parser, so that they stay text"),
        ("{{ messages }}", "a chat template without tools"),
    ):
        (directory / "chat_template.jinja").write_text(template)
        assert inspect(directory).tokenizer.endswith(said)
