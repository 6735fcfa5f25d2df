"""Gemma 4 assistants against what transformers drafts (tests/golden/make_assistants.py)."""

import json
import shutil
from pathlib import Path
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jdisagg.errors import CheckpointError, LayoutError
from jdisagg.layout.axes import Layout
from jdisagg.model_api import Attend, AttendOptions, GivenTokens, Shards
from jdisagg.ops.dense_attention import Following, dense_causal_attend
from models.checkpoint import load_model
from models.decoder import Decoder
from tests.golden.arrays import arrays_of
from tests.lanes import first_quick
from tests.shapes import GOLDEN

ASSISTANTS = {"unified": "gemma4_unified", "clusters": "gemma4_clusters"}
CHAIN = 3


def loaded(name: str, folder: Path | None = None, model: str = "", layout: str = "tp=1") -> Decoder:
    parsed = Layout.parse(layout)
    return load_model(
        GOLDEN / (model or ASSISTANTS[name]),
        parsed,
        jax.devices()[: parsed.devices],
        draft=str(folder or GOLDEN / "assistants" / name),
    ).model


def changed(name: str, to: Path, *, text: dict[str, Any] | None = None, **fields: object) -> Path:
    folder = Path(shutil.copytree(GOLDEN / "assistants" / name, to / "assistant"))
    path = folder / "config.json"
    known = json.loads(path.read_text())
    known["text_config"] |= text or {}
    path.write_text(json.dumps(known | fields))
    return folder


class Computed:
    """What a model computes for tokens: hidden states, and the keys and values of its layers."""

    def __init__(self, model: Decoder, tokens: np.ndarray) -> None:
        self.model, self.tokens = model, tokens
        self._kv: dict[int, tuple[jax.Array, jax.Array]] = {}
        following = Following(dense_causal_attend)  # type: ignore[arg-type]
        positions_T = jnp.arange(len(tokens))
        x_TD = model.stem.embed(jnp.asarray(tokens), Shards())
        given = GivenTokens(jnp.asarray(tokens), x_TD)
        for index, layer in enumerate(model.layers):
            attend = following.over(index, model.kv_spec.layers[index].source)
            x_TD = layer(x_TD, positions_T, self._keeping(index, attend), Shards(), given=given)
        self._hidden_TD = model.stem.normed(x_TD)

    def _keeping(self, index: int, attend: Attend) -> Attend:
        def keeping(
            q_TNH: jax.Array,
            k_TKH: jax.Array | None,
            v_TKH: jax.Array | None,
            **how: Unpack[AttendOptions],
        ) -> jax.Array:
            if k_TKH is not None and v_TKH is not None:
                self._kv[index] = k_TKH, v_TKH
            return attend(q_TNH, k_TKH, v_TKH, **how)

        return keeping

    def drafted(self, count: int) -> tuple[list[int], np.ndarray]:
        """The chain of drafts after `count` tokens, of which the model has not computed the last,
        and their logits."""
        stem, drafter, token = self.model.stem, self.model.next_token, int(self.tokens[count - 1])
        assert drafter is not None

        def last(every_T: jax.Array) -> jax.Array:  # of one shape for every `count`
            return jax.lax.dynamic_slice_in_dim(every_T, count - 2, 1)

        def attend(
            q_TNH: jax.Array,
            k_TKH: jax.Array | None,
            v_TKH: jax.Array | None,
            **how: Unpack[AttendOptions],
        ) -> jax.Array:
            assert k_TKH is None and v_TKH is None
            k_TKH, v_TKH = self._kv[how.pop("source")]
            every_TNH = jnp.repeat(q_TNH, len(self.tokens), axis=0)
            return last(dense_causal_attend(every_TNH, k_TKH, v_TKH, **how))

        y_1D = drafter.fused(last(self._hidden_TD), Shards())
        drafts, logits = [], []
        for number in range(CHAIN):
            if number:
                y_1D = drafter.carried(y_1D, Shards())
            embedded_1D = stem.embed(jnp.asarray([token]), Shards())
            y_1D = drafter(embedded_1D, y_1D, jnp.asarray([count - 1]), attend, Shards())
            logits_1V = drafter.logits(y_1D, Shards())
            assert logits_1V is not None
            logits.append(np.asarray(logits_1V)[0])
            token = int(logits[-1].argmax())
            drafts.append(token)
        return drafts, np.stack(logits)


@pytest.mark.parametrize(("name",), first_quick([(name,) for name in ASSISTANTS]))
def test_drafts_and_their_logits_equal_those_of_transformers(name: str) -> None:
    model, expected = loaded(name), arrays_of(GOLDEN / "assistants" / name / "expected.npz")
    known = arrays_of(GOLDEN / ASSISTANTS[name] / "expected.npz")
    tokens = np.concatenate((known["prompt"], known["greedy"]))
    assert model.next_token is not None and model.next_token.source == "assistant"
    assert len(model.kv_spec.layers) == len(model.layers), "it has no KV"
    computed = Computed(model, tokens)
    for place, logits in zip(expected["of_logits"], expected["logits"], strict=True):
        drafts, got = computed.drafted(int(expected["places"][place]))
        assert drafts == expected["drafts"][place].tolist()
        masked = np.isinf(logits)
        assert masked.any() == (name == "clusters")
        np.testing.assert_array_equal(np.isinf(got), masked)
        assert np.abs(got[~masked] - logits[~masked]).max() < 2e-4  # float noise, as of the model


def test_an_assistant_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], dict[str, object], str]] = [
        ({}, {"backbone_hidden_size": 40}, "must be the model's 32, got 40"),
        ({"vocab_size": 131}, {}, "vocab_size must be the model's 132, got 131"),
        ({"head_dim": 16}, {}, "the head size of the model's layer 2, 12, got 16"),
        ({"sliding_window": 8}, {}, "layer 0 must have the window of the model's layer 2, 9, got"),
        ({"num_kv_shared_layers": 2}, {}, "num_kv_shared_layers must be num_hidden_layers=4"),
        ({"hidden_size_per_layer_input": 6}, {}, "hidden_size_per_layer_input must be 0 or false"),
        ({}, {"num_centroids": 13}, "num_centroids must divide vocab_size=132"),
        ({"unheard_of": 1}, {}, "unheard_of=1"),
    ]
    for number, (text, fields, message) in enumerate(refused):
        to = tmp_path / str(number)
        to.mkdir()
        with pytest.raises(CheckpointError, match=message):
            loaded("clusters", changed("clusters", to, text=text, **fields))
    with pytest.raises(CheckpointError, match="the model must be a Gemma 4 .* got llama"):
        loaded("clusters", model="llama_tied")
    folder = changed("unified", tmp_path, text={"intermediate_size": 42})
    with pytest.raises(LayoutError, match="tp=4 .* 42 ffn width"):
        loaded("unified", folder, layout="tp=4")


def test_an_ordering_that_lacks_a_token_is_refused_and_keys_in_the_files_are_ignored(
    tmp_path: Path,
) -> None:
    folder = changed("clusters", tmp_path)
    stored = load_file(folder / "model.safetensors")
    keys = {"model.layers.0.self_attn.k_proj.weight": np.ones((48, 24), np.float32)}
    save_file(stored | keys, folder / "model.safetensors")
    assert loaded("clusters", folder).next_token is not None
    stored["masked_embedding.token_ordering"][3] = stored["masked_embedding.token_ordering"][4]
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="must name each of 132 tokens once"):
        loaded("clusters", folder)
