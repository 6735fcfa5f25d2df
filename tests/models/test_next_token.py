"""The next-token layer against a plain NumPy forward pass of the published formula (DeepSeek-V3
technical report, section 2.2), on random checkpoints."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jdisagg.errors import CheckpointError
from jdisagg.layout.axes import Layout
from jdisagg.model_api import Shards
from jdisagg.ops.dense_attention import dense_causal_attend
from jdisagg.ops.dense_recurrence import recur_from_the_beginning
from models.checkpoint import load_model
from models.decoder import Decoder
from tests.end_to_end.clusters import GOLDEN
from tests.lanes import first_quick
from tests.models.next_token_checkpoints import usual_names, with_next_token_layer
from tests.models.plain_layers import TOKENS, norm, plain_attention, plain_feed_forward

Tensors = dict[str, np.ndarray]


def loaded(directory: Path, next_token: bool = True) -> Decoder:
    return load_model(directory, Layout(), jax.devices()[:1], next_token=next_token).model


def joined(
    stored: Tensors, number: int, y_TD: np.ndarray, epsilon: float, above: float
) -> np.ndarray:
    """The layer's input: token t and the hidden state at t - 1, zero where there is none."""
    names = ("enorm", "hnorm")
    of = {name: above + stored[f"model.layers.{number}.{name}.weight"] for name in names}
    embedded = stored["model.embed_tokens.weight"][TOKENS]
    both = np.concatenate(
        [norm(embedded[1:], of["enorm"], epsilon), norm(y_TD[:-1], of["hnorm"], epsilon)], axis=1
    )
    x_TD = both @ stored[f"model.layers.{number}.eh_proj.weight"].T
    return np.concatenate([np.zeros_like(x_TD[:1]), x_TD])


def plain_layer(x_TD: np.ndarray, stored: Tensors, prefix: str, fields: dict) -> np.ndarray:
    """A Llama layer: grouped attention with rotary positions, and a gated feed-forward block."""
    epsilon = fields["rms_norm_eps"]

    def weight(name: str) -> np.ndarray:
        return stored[f"{prefix}{name}.weight"]

    into = norm(x_TD, weight("input_layernorm"), epsilon)
    x_TD = x_TD + plain_attention(into, weight, fields)
    into = norm(x_TD, weight("post_attention_layernorm"), epsilon)
    return x_TD + plain_feed_forward(into, weight)


def layer_of_a_longer_model(x_TD: np.ndarray, directory: Path, folder: Path) -> np.ndarray:
    """The layer as the last one of an ordinary model with one more layer, whose form is held
    against transformers elsewhere."""
    longer = Path(shutil.copytree(directory, folder / "longer"))
    fields = json.loads((longer / "config.json").read_text())
    number = fields["num_hidden_layers"]
    fields |= {"num_hidden_layers": number + 1, "num_nextn_predict_layers": 0}
    if "layer_types" in fields:
        fields["layer_types"].append("full_attention")
    if "mlp_layer_types" in fields:
        fields["mlp_layer_types"].append("sparse")
    (longer / "config.json").write_text(json.dumps(fields))
    stored = usual_names(load_file(longer / "model.safetensors"), number)
    own = ("enorm", "hnorm", "eh_proj", "shared_head", "embed_tokens")
    prefixes = tuple(f"model.layers.{number}.{name}." for name in own)
    rest = {name: tensor for name, tensor in stored.items() if not name.startswith(prefixes)}
    save_file(rest, longer / "model.safetensors")
    layer = loaded(longer, next_token=False).layers[number]
    return np.asarray(
        layer(jnp.asarray(x_TD), jnp.arange(len(x_TD)), dense_causal_attend, Shards())
    )


@pytest.mark.parametrize(
    ("name",),
    first_quick(
        [
            ("llama_tied",),
            ("qwen3_next",),
            ("deepseek_v3",),
            ("glm4_moe",),
            ("deepseek_v32",),
            ("bailing_hybrid",),
        ]
    ),
)
def test_the_layer_is_the_published_formula(name: str, tmp_path: Path) -> None:
    mtp = name == "qwen3_next"
    directory, above = with_next_token_layer(GOLDEN / name, tmp_path, mtp=mtp), float(mtp)
    fields = json.loads((directory / "config.json").read_text())
    model, positions = loaded(directory), jnp.arange(len(TOKENS))
    number, epsilon = fields["num_hidden_layers"], fields["rms_norm_eps"]
    stored = {
        name: tensor.astype(np.float32)
        for name, tensor in usual_names(
            load_file(directory / "model.safetensors"), fields["num_hidden_layers"]
        ).items()
    }
    assert len(model.kv_spec.layers) == number + 1 == len(model.layers) + 1

    x_TD = model.stem.embed(jnp.asarray(TOKENS), Shards())
    for layer, kept in zip(model.layers, model.kv_spec.layers, strict=False):
        recur = recur_from_the_beginning(kept.state, "float32", len(TOKENS), Shards())
        x_TD = layer(x_TD, positions, dense_causal_attend, Shards(), recur=recur)
    y_TD = model.stem.normed(x_TD)
    known_T1 = (positions > 0)[:, None]
    embedded_TD = model.stem.embed(jnp.asarray(TOKENS), Shards())
    assert model.next_token is not None
    got_TD = model.next_token(
        jnp.where(known_T1, embedded_TD, 0),
        jnp.where(known_T1, jnp.roll(y_TD, 1, axis=0), 0),
        positions,
        dense_causal_attend,
        Shards(),
    )

    wanted_TD = joined(stored, number, np.asarray(y_TD), epsilon, above)
    wanted_TD = (
        plain_layer(wanted_TD, stored, f"model.layers.{number}.", fields)
        if name == "llama_tied"
        else layer_of_a_longer_model(wanted_TD, directory, tmp_path)
    )
    last = above + stored[f"model.layers.{number}.shared_head.norm.weight"]
    wanted_TD = norm(wanted_TD, last, epsilon)
    head = stored.get("lm_head.weight", stored["model.embed_tokens.weight"])
    assert np.abs(np.asarray(got_TD) - wanted_TD).max() < 2e-5
    logits = np.asarray(model.stem.project(got_TD, Shards()))[:, : model.vocabulary]
    assert np.abs(logits - wanted_TD @ head.T).max() < 1e-4


@pytest.mark.parametrize(("name",), first_quick([("deepseek_v3",), ("glm4_moe",)]))
def test_without_the_layer_or_the_wish_nothing_is_read(name: str, tmp_path: Path) -> None:
    assert loaded(GOLDEN / name).next_token is None
    assert loaded(with_next_token_layer(GOLDEN / name, tmp_path), False).next_token is None


def test_a_layer_of_another_form_is_not_read_and_a_missing_tensor_is_named(tmp_path: Path) -> None:
    directory = with_next_token_layer(GOLDEN / "glm4_moe", tmp_path)
    stored = load_file(directory / "model.safetensors")
    missing = "model.layers.3.self_attn.o_proj.weight"
    others = {name: tensor for name, tensor in stored.items() if name != missing}
    save_file(others, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing: model\.layers\.3\.self_attn\.o_proj"):
        loaded(directory)
    del stored["model.layers.3.shared_head.norm.weight"]
    save_file(stored, directory / "model.safetensors")
    assert loaded(directory).next_token is None
