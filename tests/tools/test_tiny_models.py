"""The shipped tiny models: what is in their folders, what they write, and the script that made
them."""

import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax import nnx
from safetensors.numpy import load_file

from jdisagg.errors import ConfigError
from jdisagg.layout.axes import Layout
from jdisagg.model_api import Shards
from jdisagg.ops.dense_attention import dense_causal_attend
from models.checkpoint import load_model
from models.decoder import Decoder
from models.next_token import NextTokenLayer
from models.tokenizer import Tokenizer
from tests.lanes import first_ci, first_quick
from tools.tiny_models import hybrid
from tools.tiny_models.corpus import TURN, document, documents
from tools.tiny_models.export import write_checkpoint
from tools.tiny_models.network import PackedRows, TinyNetwork, TinyShape
from tools.tiny_models.served import ServedNetwork, drafted
from tools.tiny_models.train_next_token import add_layer, train_layer
from tools.tiny_models.training import (
    Schedule,
    TrainingProgress,
    encoded,
    joined,
    packed_rows,
    train,
)

TINY = Path(__file__).parents[2] / "models" / "tiny"
FAMILIES = ("llama", "qwen3_moe")
SMALL = {
    "llama": TinyShape("llama", layers=1, width=32, ffn=32, head_dim=8, context_tokens=256),
    "qwen3_moe": TinyShape(
        "qwen3_moe", layers=2, width=32, head_dim=8, experts=8, expert_ffn=8, context_tokens=256
    ),
}
QUICK = Schedule(steps=12, seed=5, tokens_per_step=512, row_tokens=256, warmup_steps=2)


@cache
def shipped(family: str) -> tuple[Decoder, Tokenizer]:
    return load(TINY / family), Tokenizer.from_directory(TINY / family)


def load(folder: Path) -> Decoder:
    return load_model(folder, Layout(), jax.devices()[:1]).model


@cache
def forward(family: str):
    graph, weights = nnx.split(shipped(family)[0])
    run = jax.jit(
        lambda weights, tokens_T: nnx.merge(graph, weights)(
            tokens_T, jnp.arange(tokens_T.shape[0]), dense_causal_attend
        )
    )
    return lambda tokens_T: run(weights, tokens_T)


def plain_tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(TINY / "llama" / "tokenizer.json"))


def first_document(tokenizer: tokenizers.Tokenizer) -> tuple[PackedRows, np.ndarray]:
    """A row of documents, and the places of its first one."""
    row = next(packed_rows(encoded(tokenizer, documents(9)), 256))
    rows = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], row)
    return rows, np.flatnonzero(np.asarray(rows.documents[0]) == 1)


def train_quickly(
    family: str, keep: Path | None = None, schedule: Schedule = QUICK
) -> tuple[TinyNetwork, list[float]]:
    tokenizer = plain_tokenizer()
    losses: list[float] = []

    def record(progress: TrainingProgress, network: TinyNetwork) -> None:
        losses.append(progress.told[0])

    network = TinyNetwork(SMALL[family], schedule.seed)
    return train(network, tokenizer, schedule, record, every=3, keep=keep), losses


trained = cache(train_quickly)


def assert_same_weights(left: TinyNetwork, right: TinyNetwork) -> None:
    states = [jax.tree.leaves(nnx.state(network)) for network in (left, right)]
    for mine, yours in zip(*states, strict=True):
        np.testing.assert_array_equal(mine, yours)


def test_the_shipped_folders_are_complete_and_small_and_any_small_layout_divides_them() -> None:
    parts = ("config", "generation_config", "tokenizer", "tokenizer_config")
    wanted = {"model.safetensors", *(f"{name}.json" for name in parts)}
    paths = [path for family in FAMILIES for path in (TINY / family).iterdir()]
    assert sum(path.stat().st_size for path in paths) < 10_000_000
    for family in FAMILIES:
        assert {path.name for path in (TINY / family).iterdir()} == wanted
        model, tokenizer = shipped(family)
        assert tokenizer.vocabulary == model.vocabulary
        spread = family == "qwen3_moe"
        for dp, tp, ep in ((1, 4, 1), (2, 2, 4 if spread else 1), (8, 1, 8 if spread else 1)):
            Layout(dp, tp, ep).check(model.geometry)
        for name, tensor in load_file(TINY / family / "model.safetensors").items():
            assert tensor.dtype == np.float32 and np.isfinite(tensor).all(), name
    one, other = ((TINY / family / "tokenizer.json").read_bytes() for family in FAMILIES)
    assert one == other


TEXTS = (
    "Once upon a time",
    "Où est l'été ? Ça va.",
    "これは犬です。",
    "Привет, мир!",
    "مرحبا بالعالم",
    "हिन्दी",
    "👩‍👩‍👧 🙂\n\n  \t x",
    "a\u0000b",
)


def test_the_tokenizer_gives_back_any_text() -> None:
    tokenizer = shipped("llama")[1]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids[0] == tokenizer.bos_id
        assert tokenizer.decode(ids) == text


def test_the_chat_template_writes_what_the_model_was_trained_on() -> None:
    tokenizer = shipped("llama")[1]
    talk = next(
        text for text in documents(0) if text.startswith(TURN["user"]) and text.endswith("<|end|>")
    )
    turns = re.findall(r"<\|(user|assistant)\|>(.*?)<\|end\|>", talk, flags=re.DOTALL)
    messages = [{"role": role, "content": content} for role, content in turns]
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == "<s>" + talk


@pytest.mark.parametrize(("family",), first_quick([("llama",), ("qwen3_moe",)]))
def test_the_shipped_model_predicts_unseen_stories_well(family: str) -> None:
    """Bigram counts need 2.4 nats a token."""
    losses = []
    for index in range(6):
        ids = shipped(family)[1].encode(document(0, index, held_out=True))[:384]
        buffer = np.zeros(384, np.int32)
        buffer[: len(ids)] = ids
        scores = jax.nn.log_softmax(forward(family)(jnp.asarray(buffer))[: len(ids) - 1])
        losses += [-float(scores[place, token]) for place, token in enumerate(ids[1:])]
    assert np.mean(losses) < 0.5


@pytest.mark.ci
@pytest.mark.parametrize(("family",), first_ci([("qwen3_moe",), ("llama",)]))
def test_a_few_training_steps_reduce_the_loss(family: str) -> None:
    _, losses = trained(family)
    assert losses[0] > 0.8 * math.log(1280)
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.ci
def test_training_again_stopped_midway_and_taken_up_gives_the_same_weights(tmp_path: Path) -> None:
    """The kept state is of a run of fewer steps, stopped within the part that does not depend on
    their number."""
    keep = tmp_path / "state.npz"
    keep.write_text("no state")
    with pytest.raises(ConfigError, match="state.npz holds no state of this training"):
        train_quickly("qwen3_moe", keep)
    keep.unlink()
    train_quickly("qwen3_moe", keep, replace(QUICK, steps=8, seconds_at_most=0.0))
    assert_same_weights(train_quickly("qwen3_moe", keep)[0], trained("qwen3_moe")[0])


@pytest.mark.ci
@pytest.mark.parametrize(("family",), first_ci([("qwen3_moe",), ("llama",)]))
def test_a_written_checkpoint_gives_the_serving_model_the_trained_logits(
    family: str, tmp_path: Path
) -> None:
    network, _ = trained(family)
    tokenizer = plain_tokenizer()
    write_checkpoint(network, tokenizer, tmp_path)
    rows, first = first_document(tokenizer)
    expected_TV = nnx.jit(lambda network, rows: network(rows)[0][0])(network, rows)[first]
    run = nnx.jit(
        lambda model, tokens_T: model(tokens_T, jnp.arange(tokens_T.shape[0]), dense_causal_attend)
    )
    np.testing.assert_allclose(run(load(tmp_path), rows.tokens[0, first]), expected_TV, atol=1e-4)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == family


def small_llama(folder: Path) -> Decoder:
    write_checkpoint(trained("llama")[0], plain_tokenizer(), folder)
    return load(folder)


def small_hybrid(folder: Path) -> Decoder:
    kinds = ["linear_attention", "full_attention"]
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    config, tokenizer = hybrid.CONFIG | small | {"layer_types": kinds}, plain_tokenizer()
    network = ServedNetwork(hybrid.untrained(config, 5))
    model = train(network, tokenizer, replace(QUICK, steps=3), lambda *_: None).model
    hybrid.write(model, config, tokenizer, folder)
    read = load(folder)
    before, mine, yours = (
        jax.tree.leaves(nnx.state(each)) for each in (hybrid.untrained(config, 5), model, read)
    )
    for at, leaf in enumerate(yours):
        np.testing.assert_array_equal(leaf, mine[at])
        assert not np.array_equal(leaf, before[at]), "it was not trained"
    return read


@pytest.mark.ci
@pytest.mark.parametrize(
    ("written", "names"),
    [
        (small_llama, {"model.layers.1.eh_proj.weight", "model.layers.1.self_attn.q_proj.weight"}),
        (
            small_hybrid,
            {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"},
        ),
    ],
)
def test_a_next_token_layer_is_trained_alone_and_read_back(
    written: Callable[[Path], Decoder], names: tuple[str, ...], tmp_path: Path
) -> None:
    model, tokenizer = written(tmp_path), plain_tokenizer()
    before = load_file(tmp_path / "model.safetensors")
    told: list[tuple[float, ...]] = []
    layer = train_layer(
        model, tokenizer, replace(QUICK, steps=3), lambda progress: told.append(progress.told)
    )
    assert len(told) == 1 and len(told[0]) == 3, "the choices that agree, by depth"
    add_layer(layer, model, tmp_path)
    after = load_file(tmp_path / "model.safetensors")
    assert all(np.array_equal(after[name], tensor) for name, tensor in before.items())
    assert {*names} <= after.keys() - before.keys()
    read = load_model(tmp_path, Layout(), jax.devices()[:1], next_token=True).model.next_token
    for mine, yours in zip(*map(leaves, (layer, read)), strict=True):
        np.testing.assert_array_equal(mine, yours)


def leaves(module: object) -> list[jax.Array]:
    return jax.tree.leaves(nnx.state(module))


class AppendingAttention:
    """Attention over the tokens of all calls so far, as with a cache."""

    def __init__(self) -> None:
        self._kept: list[tuple[jax.Array, ...]] = []

    def __call__(self, q_TNH, k_TKH, v_TKH, *, scale, window, **_):
        self._kept.append((k_TKH, v_TKH))
        k_SKH, v_SKH = (jnp.concatenate(part) for part in zip(*self._kept, strict=True))
        q_SNH = jnp.pad(q_TNH, ((len(k_SKH) - len(q_TNH), 0), (0, 0), (0, 0)))
        out_SNH = dense_causal_attend(q_SNH, k_SKH, v_SKH, scale=scale, window=window)
        return out_SNH[-len(q_TNH) :]


@pytest.mark.ci
def test_training_drafts_in_a_chain_as_a_decode_step_does() -> None:
    """Each draft after each token by itself, in the second of two documents of a row."""
    model = load_model(TINY / "llama", Layout(), jax.devices()[:1], next_token=True).model
    network, layer = ServedNetwork(model), model.next_token
    assert isinstance(layer, NextTokenLayer)
    first, tokens, order = 5, 17, np.arange(17, dtype=np.int32)
    documents, positions = 1 + (order >= first), np.where(order < first, order, order - first)
    row = PackedRows(order * 31 % 1000, order, documents, positions)  # type: ignore[arg-type]
    rows = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.int32)[None], row)
    y_RTD, embedded_RTD = network.hidden(rows), network.embed(rows)
    chain = drafted(layer, embedded_RTD, y_RTD, rows, 3)
    for last in (first + 1, first + 4, tokens - 3):  # the last token that the model chose
        attend, at = AppendingAttention(), slice(first + 1, last + 1)
        attend(
            *jnp.zeros((3, 1, 4, 16)), scale=1.0, window=None
        )  # before the first nothing is known
        y_TD = y_RTD[0, first:last]
        for draft_RTD in chain:
            y_TD = layer(embedded_RTD[0, at], y_TD, rows.positions[0, at], attend, Shards())[-1:]
            np.testing.assert_allclose(y_TD[0], draft_RTD[0, at.stop - 1], atol=1e-4)
            at = slice(at.stop, at.stop + 1)


@pytest.mark.ci
def test_the_experts_of_the_shipped_model_are_all_used() -> None:
    """An expert that no token of 6 stories chooses would have been collapsed away by training."""
    tensors = load_file(TINY / "qwen3_moe" / "model.safetensors")
    model, tokenizer = shipped("qwen3_moe")
    stories = [tokenizer.encode(document(0, index, held_out=True)) for index in range(6)]
    ids = jnp.asarray(sum(stories, [])[:384])
    x_TD, positions_T = model.stem.embed(ids, Shards()), jnp.arange(len(ids))
    for number, layer in enumerate(model.layers):
        middle_TD = x_TD + layer.attention(
            layer.attention_norm(x_TD), positions_T, dense_causal_attend, Shards()
        )
        scores_TE = (
            np.asarray(layer.mlp_norm(middle_TD))
            @ tensors[f"model.layers.{number}.mlp.gate.weight"].T
        )
        top_TC = np.argsort(-scores_TE, axis=-1)[:, :2]
        assert set(top_TC.ravel().tolist()) == set(range(8))
        x_TD = layer(x_TD, positions_T, dense_causal_attend, Shards())


def test_the_corpus_is_a_function_of_seed_and_index() -> None:
    assert [document(3, index) for index in range(50)] == list(islice(documents(3), 50))
    assert not {document(3, index) for index in range(50)} & {
        document(3, index, held_out=True) for index in range(50)
    }
    assert document(3, 7) != document(4, 7)


def test_the_corpus_is_the_one_that_the_shipped_weights_learned() -> None:
    digest = hashlib.sha256()
    for seed in (0, 5):
        for held_out, documents_read in ((False, 400), (True, 50)):
            for index in range(documents_read):
                digest.update(document(seed, index, held_out=held_out).encode())
    assert digest.hexdigest() == "9c3ac9206d307777ad2b2fb27d2fe0b181fb6368d2d07a4674ee428c5ae2bf57"


def test_no_document_shows_its_template() -> None:
    for text in islice(documents(1), 1500):
        assert text.endswith(("</s>", "<|end|>"))
        for part in re.split(r"<[^>]*>", text.replace("bigger and bigger", "bigger")):
            assert not re.search(r"[\[\]{}<>]|  | [.,!?]|^\s|\ba [aeiou]|\b(\w+) \1\b", part), part


def test_rows_hold_whole_documents_and_predict_within_them() -> None:
    tokenizer = plain_tokenizer()
    for row in islice(packed_rows(encoded(tokenizer, documents(2)), 512), 20):
        _check_row(row)
        one, count = joined(row), np.count_nonzero(row.documents)
        np.testing.assert_array_equal(one.positions, np.arange(512))
        np.testing.assert_array_equal(one.targets[: count - 1], np.asarray(row.tokens)[1:count])
        assert (np.asarray(one.targets)[count - 1 :] == -1).all()


def _check_row(row: PackedRows) -> None:
    tokens, targets, numbers, positions = (
        np.asarray(leaf) for leaf in (row.tokens, row.targets, row.documents, row.positions)
    )
    assert numbers[0] == 1
    for number in range(1, numbers.max() + 1):
        own = np.flatnonzero(numbers == number)
        assert (np.diff(own) == 1).all() and tokens[own[0]] == 0
        np.testing.assert_array_equal(positions[own], np.arange(len(own)))
        np.testing.assert_array_equal(targets[own[:-1]], tokens[own[1:]])
        assert targets[own[-1]] == -1
    assert (targets[numbers == 0] == -1).all()
