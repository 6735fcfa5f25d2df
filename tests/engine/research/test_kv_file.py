"""A cache goes into a file and comes back under any layout, or is refused by name."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from jdisagg.engine.research.face import Engine
from jdisagg.engine.research.kv_cache import KVCache
from jdisagg.engine.research.kv_file import read_kv, write_kv
from jdisagg.errors import ConfigError, KVFileError
from jdisagg.layout.kv_spec import KVSpec
from tests.engine.research.research_engines import (
    DP2,
    NAME,
    NEW_TOKENS,
    TP4,
    Expected,
    assert_same_kv,
    hugging_face,
    open_engine,
)


def test_a_cache_that_was_saved_is_loaded_under_another_layout_and_goes_on(
    engine: Engine, golden: Expected, kv: KVCache, tmp_path: Path
) -> None:
    path = tmp_path / "story.kv"
    engine.save(kv, path)
    assert [file.name for file in tmp_path.iterdir()] == ["story.kv"]
    loaded = engine.load(path, layout=DP2)
    assert loaded.layout == DP2 and loaded.chosen == kv.chosen
    assert_same_kv(loaded, kv)
    with engine.create_session("s", layout=DP2) as session:
        session.push(loaded)
        found = engine.generate_tokens(session, NEW_TOKENS).token_ids
    assert found == tuple(golden.greedy[:NEW_TOKENS])
    engine.save(loaded[:7], path)
    assert_same_kv(engine.load(path, layout=TP4), kv[:7])
    engine.save(loaded[7:], path)
    rest = engine.load(path, layout=TP4)
    assert rest.positions == range(7, 24)
    assert_same_kv(kv[:7].join(rest), kv)


def test_another_tool_reads_the_tensors_by_name(
    engine: Engine, kv: KVCache, tmp_path: Path
) -> None:
    engine.save(kv, tmp_path / "story.kv")
    with safe_open(tmp_path / "story.kv", framework="np") as file:
        assert sorted(file.keys()) == [f"layers.{at}.{part}" for at in (0, 1) for part in "kv"]
        np.testing.assert_array_equal(file.get_tensor("layers.1.v"), np.asarray(kv.layer(1).v))
        header = json.loads(file.metadata()["jdisagg_kv"])
    assert header["token_ids"] == list(kv.token_ids) and header["fingerprint"] == "f00d"


@pytest.mark.ci
@pytest.mark.parametrize(("name", "dtype"), [(NAME, "bfloat16"), ("deepseek_v3", "float32")])
def test_bfloat16_and_latents_come_back_bit_for_bit(name: str, dtype: str, tmp_path: Path) -> None:
    with open_engine(name, dtype, fingerprint="f00d") as engine:
        kv = engine.prefill(hugging_face(name).prompt, layout=TP4)
        engine.save(kv, tmp_path / "kv")
        loaded = engine.load(tmp_path / "kv", layout=DP2)
        assert_same_kv(loaded, kv)
        assert jnp.dtype(loaded.spec.dtype) == dtype
        found, wanted = (engine.generate_tokens(one, 4, ignore_eos=True) for one in (loaded, kv))
    if dtype == "float32":
        assert found.token_ids == wanted.token_ids


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def test_a_file_that_was_cut_or_spoiled_is_refused(
    engine: Engine, kv: KVCache, tmp_path: Path
) -> None:
    path = tmp_path / "story.kv"
    engine.save(kv, path)
    content = path.read_bytes()
    cut, corrupt = "truncated, corrupt or no safetensors file", "is corrupt: its field jdisagg_kv_"
    for spoilt, message in (
        (content[:-1], cut),
        (content[:40], cut),
        (b"", cut),
        (b"\xff" * 64, cut),
        (flipped(content, len(content) - 5), corrupt),
        (flipped(content, content.index(b"f00d")), corrupt),
        (flipped(content, content.index(b"layers.0.k") + 9), "is corrupt"),
    ):
        path.write_bytes(spoilt)
        with pytest.raises(KVFileError, match=f"KV file {path}.*{message}"):
            engine.load(path, layout=TP4)


def test_a_file_of_something_else_is_refused_by_field_and_both_values(
    engine: Engine, kv: KVCache, tmp_path: Path
) -> None:
    path = tmp_path / "story.kv"
    with pytest.raises(KVFileError, match="cannot be read.*No such file"):
        engine.load(path, layout=TP4)
    with pytest.raises(KVFileError, match="cannot be written"):
        engine.save(kv, tmp_path / "nowhere" / "story.kv")
    write_kv(kv, path, "beef")
    with pytest.raises(KVFileError, match="its fingerprint is 'beef', and this model's is 'f00d'"):
        engine.load(path, layout=TP4)
    for spec, message in (
        (KVSpec.attention(2, 2, 8, "bfloat16"), "spec.dtype is 'float32', and .* is 'bfloat16'"),
        (KVSpec.attention(3, 2, 8, "float32"), "its spec has 2 layers, and this model's 3"),
        (KVSpec.attention(2, 2, 8, "float32", (None, 9)), r"layers\[1\] is .*None.*window=9"),
    ):
        with pytest.raises(KVFileError, match=message):
            read_kv(path, "beef", TP4, replace(kv.place, spec=spec))
    for header, message in (
        (b'{"version": 2, "more": 1}', "its version is 2, and 1 is read here"),
        (b'{"version": 1, "token_ids": 5}', "its header cannot be read"),
        (b"[]", "its header cannot be read"),
    ):
        digest = hashlib.sha256(header + b"\nx U8 [1]\n\0").hexdigest()
        metadata = {"jdisagg_kv": header.decode(), "jdisagg_kv_sha256": digest}
        save_file({"x": np.zeros(1, np.uint8)}, path, metadata)
        with pytest.raises(KVFileError, match=message):
            engine.load(path, layout=TP4)
    save_file({"weight": np.zeros(3, np.float32)}, path)
    with pytest.raises(KVFileError, match="no metadata field 'jdisagg_kv'"):
        engine.load(path, layout=TP4)


def test_an_engine_that_does_not_know_its_model_neither_saves_nor_loads(
    engine: Engine, kv: KVCache, tmp_path: Path
) -> None:
    with open_engine(NAME) as unknown:
        with pytest.raises(ConfigError, match="fingerprint: the engine has none"):
            unknown.save(kv, tmp_path / "story.kv")
        engine.save(kv, tmp_path / "story.kv")
        with pytest.raises(ConfigError, match="fingerprint: the engine has none"):
            unknown.load(tmp_path / "story.kv", layout=TP4)
