"""One checkpoint under every layout, in both formats, each device reading only its slices. Misfits
are listed."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jdisagg.errors import CheckpointError, ConfigError, LayoutError
from jdisagg.layout.axes import Layout
from jdisagg.transfer.offered_weights import OfferedWeights
from launch.convert import convert
from models.checkpoint import LoadedModel, load_config, load_model
from models.feed_forward import SparseMLP
from models.safetensors_files import SafetensorsFiles
from tests import time_scale
from tests.golden.arrays import arrays_of
from tests.lanes import first_quick
from tests.models.configs import not_refused
from tests.models.sharded import sharded_logits

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
DENSE, MOE = "llama_tied", "qwen3_moe"
LAYOUTS = {
    DENSE: ["tp=2", "tp=4", "dp=2,tp=4"],
    "llama_biased": ["tp=4"],
    "qwen3": ["dp=2,tp=2"],
    MOE: ["dp=1,tp=4,ep=4", "dp=4,tp=1,ep=4", "dp=2,tp=4,ep=8", "dp=2,tp=2,ep=1", "dp=2,tp=2,ep=2"],
    "mixtral": ["dp=2,tp=2,ep=4"],
    # norms over all heads, kv heads on fewer devices than there are; shared experts; fused tensors
    "olmo2": ["tp=4"],
    "minimax_m2": ["tp=4,ep=4"],
    "glm4_moe_groups": ["dp=2,tp=2,ep=4", "tp=4"],
    "qwen2_moe": ["dp=2,tp=2,ep=2"],
    "phi3": ["tp=2"],
    # a norm over heads of two devices; what all heads share on both
    "granite4_hybrid": ["tp=4"],
    "granite4_moe": ["dp=2,tp=2,ep=2"],
    "nemotron_h": ["tp=4"],
    "lfm2": ["tp=4"],
    # one norm over the heads of all devices
    "minimax": ["tp=4"],
    "minimax_m3": ["tp=4", "dp=2,tp=2,ep=4"],
    "llama4": ["dp=2,tp=2,ep=4"],
    "mimo_v2_flash": ["tp=4"],
    "step3p7": ["tp=2,ep=2"],
    # tensors joined head by head, on fewer devices than there are
    "kimi_linear": ["tp=4", "dp=2,tp=2,ep=4"],
    "nemotron_h_moe": ["dp=2,tp=2,ep=4"],
}
QUICK_LAYOUTS = (DENSE, MOE)  # of the families, each has a layout of its own in lane ci


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / DENSE, tmp_path / "model"))


def _load(directory: Path, layout: str = "", **options: str):
    parsed = Layout.parse(layout)
    return load_model(directory, parsed, jax.devices()[: parsed.devices], **options)


def _assert_same(found: LoadedModel, expected: LoadedModel) -> None:
    """Equal arrays in equal shardings."""
    leaves = (jax.tree.leaves(nnx.state(loaded.model)) for loaded in (found, expected))
    for one, other in zip(*leaves, strict=True):
        assert one.sharding == other.sharding
        np.testing.assert_array_equal(one, other)


def _floats(directory: Path) -> dict[str, np.ndarray]:
    files = SafetensorsFiles.from_directory(directory)
    return {
        name: np.array(files.read(name, (slice(None),) * len(shape)), np.float32)
        for name, shape in files.shapes().items()
    }


def _index(checkpoint: Path, **files: str) -> None:
    index = {"metadata": None, "weight_map": files}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        case
        for name, layouts in LAYOUTS.items()
        for case in first_quick(((name, layout) for layout in layouts), quick=name in QUICK_LAYOUTS)
    ],
)
def test_logits_do_not_depend_on_the_layout(name: str, layout: str) -> None:
    expected = arrays_of(GOLDEN / name / "expected.npz")
    ranks = Layout.parse(layout).dp
    logits_BTV = sharded_logits(
        _load(GOLDEN / name, layout),
        np.stack([np.roll(expected["prompt"], rank) for rank in range(ranks)]),
    )
    assert np.abs(logits_BTV[0] - expected["logits"]).max() < 2e-4


def test_layers_of_one_configuration_have_equal_structure() -> None:
    for name, structures in ((DENSE, 1), ("llama_sharded", 1), (MOE, 2), ("qwen2_windows", 2)):
        model = _load(GOLDEN / name).model
        assert len({nnx.graphdef(layer) for layer in model.layers}) == structures


def test_bfloat16_weights_are_the_stored_ones_in_either_orientation() -> None:
    stored = SafetensorsFiles.from_directory(GOLDEN / "qwen3").read(
        "model.layers.0.mlp.up_proj.weight", (slice(None),) * 2
    )
    on_cpu, elsewhere = (
        _load(GOLDEN / "qwen3", "tp=2", dtype="bfloat16", platform=platform).model
        for platform in ("cpu", "tpu")
    )
    for kernel, expected in (
        (on_cpu.layers[0].mlp.up.kernel, stored),
        (elsewhere.layers[0].mlp.up.kernel, stored.T),
    ):
        assert kernel[...].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(np.asarray(kernel[...]), expected)


def test_a_process_reads_each_slice_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read_bytes: dict[str, int] = {}
    plain_read = SafetensorsFiles.read

    def counted(self: SafetensorsFiles, name: str, index: tuple[slice, ...]) -> np.ndarray:
        part = plain_read(self, name, index)
        read_bytes[name] = read_bytes.get(name, 0) + part.nbytes
        return part

    monkeypatch.setattr(SafetensorsFiles, "read", counted)
    loaded = _load(GOLDEN / MOE, "dp=2,tp=2,ep=4")
    monkeypatch.undo()
    files = SafetensorsFiles.from_directory(GOLDEN / MOE)
    whole_bytes = {name: 2 * int(np.prod(shape)) for name, shape in files.shapes().items()}
    assert read_bytes == whole_bytes  # all four devices together: replicas share a read
    mlp = loaded.model.layers[1].mlp
    assert isinstance(mlp, SparseMLP)
    experts = mlp.up[...]
    assert [shard.data.nbytes for shard in experts.addressable_shards] == [experts.nbytes // 4] * 4


def test_experts_may_be_stored_fused(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / MOE, tmp_path / "model")
    tensors = _floats(GOLDEN / MOE)
    for layer in (1, 2):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            [tensors.pop(f"{prefix}{expert}.{kind}_proj.weight") for expert in range(8)]
            for kind in ("gate", "up", "down")
        )
        tensors[prefix + "gate_up_proj"] = np.concatenate((np.stack(gate), np.stack(up)), axis=1)
        tensors[prefix + "down_proj"] = np.stack(down)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    for layout in ("dp=2,tp=2,ep=4", "dp=1,tp=2,ep=1"):
        _assert_same(_load(tmp_path / "model", layout), _load(GOLDEN / MOE, layout))


@pytest.mark.parametrize(("name",), first_quick([("llama_biased",), (MOE,)]))
def test_the_orbax_form_loads_under_any_layout_and_orientation(name: str, tmp_path: Path) -> None:
    convert(GOLDEN / name, tmp_path / "orbax", "auto", devices=2)
    for layout, dtype in (
        ("dp=2,tp=2" if name != MOE else "dp=2,tp=2,ep=4", "float32"),
        ("tp=4", "bfloat16"),
    ):
        _assert_same(
            _load(tmp_path / "orbax", layout, dtype=dtype),
            _load(GOLDEN / name, layout, dtype=dtype),
        )
    with pytest.raises(CheckpointError, match="already holds"):
        convert(GOLDEN / name, tmp_path / "orbax", "auto", devices=1)
    fields = json.loads((tmp_path / "orbax" / "config.json").read_text())
    (tmp_path / "orbax" / "config.json").write_text(json.dumps(fields | {"vocab_size": 140}))
    with pytest.raises(CheckpointError, match=r"stem.embedding \(140, 32\) is \(131, 32\)"):
        _load(tmp_path / "orbax")


def test_the_orbax_form_keeps_templates_and_the_form_of_embeddings(tmp_path: Path) -> None:
    source, made = tmp_path / "source", tmp_path / "orbax"
    shutil.copytree(GOLDEN / "llama_biased", source)
    tensors = load_file(source / "model.safetensors")
    del tensors["lm_head.weight"]  # an embedding model, saved without its head
    save_file(tensors, source / "model.safetensors")
    texts = {
        "modules.json": '[{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]',
        "1_Pooling/config.json": '{"pooling_mode_mean_tokens": true}',
        "config_sentence_transformers.json": '{"prompts": {"query": "q: "}}',
        "chat_template.json": '{"chat_template": "{{ messages }}"}',
        "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    }
    for name, text in texts.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    convert(source, made, "auto", devices=1)
    assert {name: (made / name).read_text() for name in texts} == texts
    _assert_same(_load(made), _load(source))


@pytest.mark.parametrize(("name",), first_quick([("gemma3",), ("lfm2",), ("nemotron_h",)]))
def test_offered_arrays_have_the_names_of_the_checkpoints_tensors(name: str) -> None:
    arrays = load_file(GOLDEN / name / "model.safetensors")
    with OfferedWeights("offer:1", arrays, 600.0) as offered:
        found = load_model(GOLDEN / name, Layout(), jax.devices()[:1], tensors=offered)
    _assert_same(found, _load(GOLDEN / name))


def _python(*arguments: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=time_scale.seconds(300),
    )


LOAD_ALL = """
import sys, jax
from jdisagg.errors import CheckpointError
from jdisagg.layout.axes import Layout
from models.checkpoint import load_model
for directory in sys.argv[1:]:
    try:
        load_model(directory, Layout(), jax.devices()[:1])
    except CheckpointError as error:
        print(error.message)
"""


@pytest.mark.ci
def test_an_orbax_checkpoint_that_was_copied_in_part_is_refused_in_one_line(tmp_path: Path) -> None:
    whole, copies = tmp_path / "whole", []
    convert(GOLDEN / DENSE, whole, "auto", devices=1)
    weights = max(
        (path for path in (whole / "orbax").rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    for path in (whole / "orbax" / "_METADATA", whole / "orbax" / "manifest.ocdbt", weights):
        copies.append(shutil.copytree(whole, tmp_path / f"without {path.name}"))
        (copies[-1] / path.relative_to(whole)).write_bytes(
            path.read_bytes()[: path.stat().st_size // 2]
        )
    # In a process of its own: Orbax leaves its other reads unfinished, and the interpreter tells of
    # them at any time after.
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = _python("-c", LOAD_ALL, *map(str, copies), environment=environment)
    said = done.stdout.splitlines()
    assert len(said) == len(copies), done
    for line, copy in zip(said, copies, strict=True):
        assert re.fullmatch(
            f"{copy}/orbax cannot be read as an Orbax checkpoint .*; convert it again", line
        )


def test_a_destination_that_cannot_be_written_is_refused_before_the_weights_are_loaded(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(
        "launch.convert.load_model", lambda *_, **__: pytest.fail("weights were loaded")
    )
    (tmp_path / "file").write_text("")
    (tmp_path / "full" / "orbax").mkdir(parents=True)
    for destination, message in (
        ("file/x", "destination: folder '.*file/x' cannot be used: Not a directory"),
        ("full", "already holds"),
    ):
        with pytest.raises(ConfigError, match=message):
            convert(GOLDEN / MOE, tmp_path / destination, "auto", devices=1)
    with pytest.raises(CheckpointError):
        convert(tmp_path / "nothing", tmp_path / "never", "auto", devices=1)
    assert not (tmp_path / "never").exists(), "nothing is made for a source that is none"


def test_missing_extra_and_misshapen_tensors_are_listed_together(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((47, 32), np.float32)
    tensors |= {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
        "surprise": np.zeros(3, np.float32),
    }
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError) as raised:
        _load(checkpoint)
    message = raised.value.message
    assert "1 missing: model.norm.weight (32,)" in message
    misshapen = "model.layers.0.mlp.up_proj.weight is (47, 32), not (48, 32)"
    assert f"1 of another shape: {misshapen}" in message
    assert "1 not known: surprise (3,)" in message and "inv_freq" not in message


def test_layers_behind_the_last_one_are_left_aside(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(GOLDEN / "deepseek_v3", tmp_path / "model"))
    tensors = {f"model.layers.{layer}.eh_proj.weight": np.zeros((4, 4)) for layer in (3, 4)}
    save_file(tensors, directory / "more.safetensors")
    own = dict.fromkeys(load_file(directory / "model.safetensors"), "model.safetensors")
    _index(directory, **own, **dict.fromkeys(tensors, "more.safetensors"))
    with pytest.raises(CheckpointError, match=r"1 not known: model\.layers\.4\.eh_proj"):
        _load(directory)


def test_experts_fused_the_other_way_round_are_read_alike(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(GOLDEN / "qwen3_vl_moe", tmp_path / "model"))
    tensors = _floats(directory)
    fused = [name for name in tensors if ".mlp.experts." in name]
    assert len(fused) == 4
    for name in fused:
        tensors[name] = np.ascontiguousarray(np.swapaxes(tensors[name], 1, 2))
    save_file(tensors, directory / "model.safetensors")
    expected = arrays_of(directory / "expected.npz")
    logits_BTV = sharded_logits(_load(directory), expected["prompt"][None])
    assert np.abs(logits_BTV[0] - expected["logits"]).max() < 2e-4


def test_what_corrects_a_choice_of_experts_stays_in_float32(tmp_path: Path) -> None:
    source = Path(shutil.copytree(GOLDEN / "glm4_moe", tmp_path / "source"))
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith("correction_bias")]:
        tensors[name] = np.linspace(0.1, 0.2, tensors[name].size, dtype=np.float32)
    save_file(tensors, source / "model.safetensors")
    model = _load(source, dtype="bfloat16").model
    mlp = model.layers[1].mlp
    assert isinstance(mlp, SparseMLP) and mlp.correction is not None
    assert mlp.correction[...].dtype == np.float32 and mlp.router[...].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(mlp.correction[...], np.linspace(0.1, 0.2, 8, dtype=np.float32))
    convert(source, tmp_path / "orbax", "auto", 1)
    again = _load(tmp_path / "orbax", dtype="bfloat16").model.layers[1].mlp
    assert isinstance(again, SparseMLP) and again.correction is not None
    np.testing.assert_array_equal(again.correction[...], mlp.correction[...])


def test_a_stored_head_is_passed_over_where_it_is_tied(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]},
        checkpoint / "model.safetensors",
    )
    assert _load(checkpoint).model.stem.head is None


def test_a_head_of_its_own_is_used_although_the_config_says_tied(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tied_BTV = sharded_logits(_load(checkpoint), tokens_BT := np.arange(3, 15)[None])
    head_VD = np.roll(tensors["model.embed_tokens.weight"], 1, axis=0)
    save_file(tensors | {"lm_head.weight": head_VD}, checkpoint / "model.safetensors")
    convert(checkpoint, tmp_path / "orbax", "auto", 1)
    for directory in (checkpoint, tmp_path / "orbax"):
        own_BTV = sharded_logits(_load(directory, "tp=2"), tokens_BT)
        np.testing.assert_allclose(own_BTV, np.roll(tied_BTV, 1, axis=-1), rtol=1e-4, atol=1e-4)
    assert "lm_head.weight differs from the embedding" in caplog.text


def test_files_that_are_broken_or_not_there_are_named_in_one_line(tmp_path: Path) -> None:
    weights, index = "model.safetensors", "model.safetensors.index.json"
    data = (GOLDEN / DENSE / weights).read_bytes()
    gone = b'{"weight_map": {"a": "gone.safetensors"}}'
    deep, shape = (
        b"[" * 100_000,
        b'{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}',
    )
    rows: list[tuple[str, dict[str, bytes | None]]] = [
        (r"truncated: its header needs", {weights: data[:-1]}),
        *(("truncated or not", {weights: data[:keep]}) for keep in (200, 4, 0)),
        *(
            ("has no valid safetensors header", {weights: struct.pack("<Q", len(head)) + head})
            for head in (deep, shape)
        ),
        *(
            ("has no readable 'weight_map'", {index: text})
            for text in (b'{"weight_map": {"a": 5}}', b'{"weight_map": {"a": null}}', deep)
        ),
        (r"missing: gone\.safetensors", {weights: None, index: gone}),
        (r"neither model\.safetensors", {weights: None}),
        (r"no config\.json", {"config.json": None}),
        ("not valid JSON", {"config.json": b"{"}),
    ]

    def load(files: dict[str, bytes | None]) -> None:
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            directory = Path(shutil.copytree(GOLDEN / DENSE, Path(folder) / "model"))
            for name, content in files.items():
                (directory / name).unlink(missing_ok=True)
                if content is not None:
                    (directory / name).write_bytes(content)
            _load(directory)

    assert not_refused(load, rows) == []
    with pytest.raises(CheckpointError, match="does not exist"):
        _load(tmp_path / "nowhere")


def test_integer_weights_are_refused_by_name(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.norm.weight"] = np.zeros(32, np.int8)
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight'.*dtype I8"):
        _load(checkpoint)


def test_layouts_and_types_that_cannot_work_are_refused_with_the_numbers() -> None:
    with pytest.raises(LayoutError, match="tp=3"):
        _load(GOLDEN / DENSE, "tp=3")
    with pytest.raises(LayoutError, match="needs 2 devices, got 1"):
        load_model(GOLDEN / DENSE, Layout(tp=2), jax.devices()[:1])
    with pytest.raises(ConfigError, match="'float16'"):
        _load(GOLDEN / DENSE, dtype="float16")


@pytest.mark.ci
def test_the_converter_makes_the_devices_that_it_is_to_spread_over(tmp_path: Path) -> None:
    """Runs in a separate process, because the number of devices is fixed once."""
    more = [f"--source={GOLDEN / MOE}", f"--destination={tmp_path / 'orbax'}", "--devices=2"]
    chosen = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    environment = {key: value for key, value in os.environ.items() if key not in chosen}
    done = _python("-m", "launch.convert", *more, environment=environment)
    assert done.returncode == 0, done.stderr
    _assert_same(_load(tmp_path / "orbax"), _load(GOLDEN / MOE))


def test_the_index_decides_which_file_a_tensor_is_read_from(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A second shard holds a stale copy of one tensor, and one that the index does not name."""
    own = load_file(checkpoint / "model.safetensors")
    stale = {"model.norm.weight": own["model.norm.weight"] + 1, "unnamed": np.zeros(3, np.float32)}
    moved = {"model.embed_tokens.weight": own.pop("model.embed_tokens.weight")}
    expected = {**own, **moved}
    save_file(own, checkpoint / "model.safetensors")
    save_file({**stale, **moved}, checkpoint / "second.safetensors")
    first, second = "model.safetensors", "second.safetensors"
    _index(checkpoint, **dict.fromkeys(own, first), **dict.fromkeys(moved, second))
    files = SafetensorsFiles.from_directory(checkpoint)
    assert files.shapes().keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(files.read(name, (slice(None),) * tensor.ndim), tensor)
    assert "ignored 2 tensors" in caplog.text
    _load(checkpoint)


@pytest.mark.parametrize("needed", [False, True])
def test_a_tensor_that_its_file_lacks_is_missing_if_the_model_needs_it(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, needed: bool
) -> None:
    own = load_file(checkpoint / "model.safetensors")
    absent = "model.norm.weight" if needed else "model.layers.0.self_attn.rotary_emb.inv_freq"
    own.pop(absent, None)
    save_file(own, checkpoint / "model.safetensors")
    _index(checkpoint, **dict.fromkeys([*own, absent], "model.safetensors"))
    if needed:
        with pytest.raises(CheckpointError, match=r"1 missing: model\.norm\.weight"):
            _load(checkpoint)
    else:
        _load(checkpoint)
    assert f"model.safetensors does not hold tensor '{absent}'" in caplog.text


@pytest.mark.parametrize("form", ["folder", "link", "strange types", "another file", "merged"])
def test_files_are_read_as_their_index_says(checkpoint: Path, form: str) -> None:
    expected, file = _load(checkpoint), "model.safetensors"
    own = load_file(checkpoint / file)
    if form in ("folder", "link"):
        (checkpoint / "text").mkdir()
        (checkpoint / file).rename(checkpoint / "text" / "a.safetensors")
        file = "./text/a.safetensors"
    if form == "link":  # as a hub's cache has them
        (checkpoint / "b.safetensors").symlink_to("text/a.safetensors")
        file = "b.safetensors"
    if form == "strange types":
        strange = {"mask": np.ones(3, bool), "many": np.ones(2, np.uint64), "f64": np.ones(2)}
        save_file({**own, **strange}, checkpoint / file)
    if form == "another file":
        save_file({name: one + 1 for name, one in own.items()}, checkpoint / "other.safetensors")
        (checkpoint / "broken.safetensors").write_bytes(b"x")
    if form == "merged":  # the index of the files before
        file = "model-00001-of-00002.safetensors"
    _index(checkpoint, **dict.fromkeys(own, file))
    _assert_same(_load(checkpoint), expected)


def test_a_complete_set_of_shards_needs_no_index(checkpoint: Path) -> None:
    expected = _load(checkpoint)
    names = list(own := load_file(checkpoint / "model.safetensors"))
    (checkpoint / "model.safetensors").unlink()
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    for first, shard in enumerate(shards):
        save_file({name: own[name] for name in names[first::3]}, checkpoint / shard)
    _assert_same(_load(checkpoint), expected)
    for shard in shards[:2]:
        (checkpoint / shard).rename(checkpoint / f"old-{shard}")
    with pytest.raises(CheckpointError, match=f"missing: {shards[0]}, {shards[1]}; fetch"):
        _load(checkpoint)
    shutil.copy(checkpoint / shards[2], checkpoint / "model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match=r"several sets \(of 00001, 00003\)"):
        _load(checkpoint)


def test_gguf_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    for given in (tmp_path, tmp_path / "model-Q4_K_M.gguf"):
        with pytest.raises(CheckpointError, match=r"GGUF format \(model-Q4_K_M.gguf\).*converted"):
            load_config(given)
