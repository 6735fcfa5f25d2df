"""An EAGLE-3 head against a plain NumPy forward pass of the published formula (arXiv:2503.01840),
on random heads in the published form."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jdisagg.errors import CheckpointError, LayoutError
from jdisagg.layout.axes import Layout
from jdisagg.model_api import Shards
from jdisagg.ops.dense_attention import dense_causal_attend
from models.checkpoint import load_model
from models.decoder import Decoder
from tests.end_to_end.clusters import GOLDEN
from tests.lanes import first_quick
from tests.models.next_token_checkpoints import eagle_head
from tests.models.plain_layers import TOKENS, norm, plain_attention, plain_feed_forward

MODEL = GOLDEN / "llama_tied"


def loaded(head: Path, model: Path = MODEL) -> Decoder:
    return load_model(model, Layout(), jax.devices()[:1], draft=str(head)).model


def changed(head: Path, **fields: object) -> Path:
    path = head / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return head


def streams_of(model: Decoder) -> list[jax.Array]:
    """The activations before each layer."""
    positions, x_TD = jnp.arange(len(TOKENS)), model.stem.embed(jnp.asarray(TOKENS), Shards())
    found = []
    for layer in model.layers:
        found.append(x_TD)
        x_TD = layer(x_TD, positions, dense_causal_attend, Shards())
    return found


@pytest.mark.parametrize(("after_norm",), first_quick([(True,), (False,)]))
def test_the_head_is_the_published_formula(after_norm: bool, tmp_path: Path) -> None:
    head = changed(eagle_head(MODEL, tmp_path), norm_before_residual=after_norm)
    model, positions = loaded(head), jnp.arange(len(TOKENS))
    fields = json.loads((head / "config.json").read_text())
    stored, epsilon = load_file(head / "model.safetensors"), fields["rms_norm_eps"]
    layer = model.next_token
    assert layer is not None and layer.source == "eagle"
    assert len(model.kv_spec.layers) == len(model.layers) + 1
    before = streams_of(model)
    tapped_TD = jnp.concatenate([before[tap] for tap in layer.taps], axis=-1)
    embedded_TD = model.stem.embed(jnp.asarray(TOKENS), Shards())
    got_TD = layer(
        embedded_TD, layer.fused(tapped_TD, Shards()), positions, dense_causal_attend, Shards()
    )
    got_RV = layer.logits(got_TD, Shards())

    def weight(name: str) -> np.ndarray:
        return stored[f"midlayer.{name}.weight"]

    y_TD = np.asarray(tapped_TD) @ stored["fc.weight"].T
    normed_TD = norm(y_TD, weight("hidden_norm"), epsilon)
    into = norm(np.asarray(embedded_TD), weight("input_layernorm"), epsilon)
    x_TD = plain_attention(np.concatenate([into, normed_TD], axis=1), weight, fields)
    x_TD = x_TD + (normed_TD if after_norm else y_TD)
    into = norm(x_TD, weight("post_attention_layernorm"), epsilon)
    x_TD = x_TD + plain_feed_forward(into, weight)
    logits = norm(x_TD, stored["norm.weight"], epsilon) @ stored["lm_head.weight"].T
    assert np.abs(np.asarray(got_TD) - x_TD).max() < 2e-5
    assert got_RV is not None and got_RV.shape == (len(TOKENS), model.vocabulary)
    assert np.all(np.asarray(got_RV)[:, :3] == -np.inf), "tokens that the head does not draft"
    assert np.abs(np.asarray(got_RV)[:, 3:] - logits).max() < 1e-4


def test_a_head_names_the_layers_that_it_needs_or_takes_those_of_the_paper(tmp_path: Path) -> None:
    head = eagle_head(MODEL, tmp_path)
    layers = len(loaded(head).layers)
    assert layers == 2
    assert loaded(head).next_token.taps == (0, 1, 1)  # type: ignore[union-attr]
    listed = {"eagle_aux_hidden_state_layer_ids": [0, 0, 1], "use_aux_hidden_state": True}
    assert loaded(changed(head, eagle_config=listed)).next_token.taps == (0, 0, 1)  # type: ignore[union-attr]
    beyond = {"eagle_aux_hidden_state_layer_ids": [0, 1, layers]}
    with pytest.raises(CheckpointError, match=f"must list layers below {layers}"):
        loaded(changed(head, eagle_config=beyond))


def test_the_head_of_another_model_is_refused(tmp_path: Path) -> None:
    head = eagle_head(MODEL, tmp_path)
    plain = (head / "config.json").read_text()
    for fields, message in (
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1, got 2"),
        ({"vocab_size": 7, "draft_vocab_size": 7}, "vocab_size must be the model's"),
        ({"hidden_size": 64}, "hidden_size must be the model's"),
    ):
        (head / "config.json").write_text(plain)
        with pytest.raises(CheckpointError, match=f"{message}.*trained for this model"):
            loaded(changed(head, **fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"intermediate_size": 42}, "the drafter of --draft: layout tp=4 .* 42 ffn width"),
        (
            {"num_attention_heads": 6, "head_dim": 8},
            "the drafter of --draft: layout tp=4 .* 6 query heads",
        ),
    ],
)
def test_a_layout_that_does_not_divide_the_head_is_refused(
    fields: dict[str, int], message: str, tmp_path: Path
) -> None:
    head = changed(eagle_head(MODEL, tmp_path), **fields)
    with pytest.raises(LayoutError, match=message):
        load_model(MODEL, Layout(tp=4), jax.devices()[:4], draft=str(head))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    head = eagle_head(MODEL, tmp_path)
    stored = load_file(head / "model.safetensors")
    del stored["midlayer.hidden_norm.weight"]
    save_file(stored, head / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing: draft\.midlayer\.hidden_norm"):
        loaded(head)
