"""A cache in the hand is cut, joined and changed.

Oracles: greedy tokens of Hugging Face transformers for the whole, caches of prompts that were
computed by themselves, and a dense forward pass over changed values."""

from dataclasses import replace
from functools import reduce
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.engine.research.face import Engine
from jdisagg.engine.research.kv_blocks import KVPlace
from jdisagg.engine.research.kv_cache import KVCache
from jdisagg.errors import IncompatiblePeerError, InvalidRequestError
from jdisagg.layout.axes import MESH_AXES
from jdisagg.layout.kv_spec import KVComponent, KVLayer, KVSpec
from tests.engine.research.research_engines import (
    DP2,
    NAME,
    NEW_TOKENS,
    TP4,
    EngineOf,
    Expected,
    assert_same_kv,
    dense_pass,
    hugging_face,
    open_engine,
)
from tests.lanes import first_quick


@pytest.mark.parametrize("cut", [7, 16])
def test_the_beginning_of_a_cache_is_the_cache_of_the_beginning(
    engine: Engine, golden: Expected, kv: KVCache, cut: int
) -> None:
    part = kv[:cut]
    assert_same_kv(part, engine.prefill(golden.prompt[:cut], layout=TP4), atol=2e-5)
    assert part.chosen is None and kv[:].next_token == kv.next_token
    with pytest.raises(InvalidRequestError, match=f"this cache of {cut} tokens was cut"):
        _ = part.next_token


@pytest.mark.parametrize(
    ("name", "cuts"),
    first_quick([(NAME, (5, 16)), ("deepseek_v3", (11,)), ("mistral_window", (9, 17))]),
)
def test_parts_joined_in_order_are_the_whole_and_go_on_as_it_does(
    engine_of: EngineOf, name: str, cuts: tuple[int, ...]
) -> None:
    expected = hugging_face(name)
    with engine_of(name) as engine:
        kv = engine.prefill(expected.prompt, layout=TP4)
        edges = [0, *cuts, len(kv)]
        parts = [kv[first:stop] for first, stop in pairwise(edges)]
        assert [part.positions for part in parts] == [range(*ends) for ends in pairwise(edges)]
        whole = reduce(KVCache.join, parts)
        assert_same_kv(whole, kv)
        with engine.create_session("s", layout=DP2) as session:
            session.push(whole)
            with pytest.raises(InvalidRequestError, match="no next token has been chosen"):
                _ = session.next_token
            tokens = engine.generate_tokens(session, NEW_TOKENS, ignore_eos=True).token_ids
        assert tokens == tuple(expected.greedy[:NEW_TOKENS])


@pytest.mark.ci
def test_what_lies_on_another_mesh_is_joined_where_the_beginning_lies(
    engine: Engine, golden: Expected, kv: KVCache
) -> None:
    with engine.create_session("s", layout=DP2) as session:
        session.push(kv)
        engine.generate_tokens(session, NEW_TOKENS)
        grown = session.pull()
    joined = kv.join(grown[len(kv) :])
    assert (joined.layout, joined.devices) == (kv.layout, kv.devices)
    assert_same_kv(joined, grown)
    found = engine.generate_tokens(joined, 4).token_ids
    assert found == tuple(golden.greedy[NEW_TOKENS : NEW_TOKENS + 4])


def test_a_part_that_does_not_begin_at_0_keeps_its_positions_and_is_not_decoded_from(
    engine: Engine, golden: Expected, kv: KVCache
) -> None:
    part = kv[10:20]
    assert part.token_ids == tuple(golden.prompt[10:20]) and part.positions == range(10, 20)
    assert part[2:5].positions == range(12, 15)
    np.testing.assert_array_equal(np.asarray(part.layer(1).k), np.asarray(kv.layer(1).k)[:, 10:20])
    with engine.create_session("s", layout=DP2) as session:
        with pytest.raises(InvalidRequestError, match="begins at position 10.*positions 0 to 9"):
            session.push(part)
        with pytest.raises(InvalidRequestError, match="begins at position 10"):
            engine.generate_tokens(part)
        with pytest.raises(InvalidRequestError, match="holds no KV"):
            _ = session.token_ids
    with pytest.raises(InvalidRequestError, match="position 10 and this one ends before 24"):
        kv.join(part)


def test_values_that_were_changed_are_what_the_next_token_attends_to(
    engine: Engine, golden: Expected, kv: KVCache
) -> None:
    """Of the last layer, so that a dense pass over changed values is an oracle: what comes before
    does not depend on it. The last token runs anew, and its own value is its own."""
    last = len(golden.prompt) - 1

    def change(layer: int, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        kept = jnp.arange(v.shape[0])[:, None, None] >= last
        return k, jnp.where(kept, v, -3.0 * v) if layer == 1 else v

    logits, _ = dense_pass(NAME, golden.prompt, change)
    wanted = int(logits[-1].argmax())
    assert wanted != kv.next_token.token_id, "else nothing is shown"
    before = np.asarray(kv.layer(1).v)
    changed = kv.with_layer(-1, v=-3.0 * before)
    assert changed.chosen is None
    np.testing.assert_array_equal(np.asarray(changed.layer(1).v), -3.0 * before)
    np.testing.assert_array_equal(np.asarray(changed.layer(1).k), np.asarray(kv.layer(1).k))
    np.testing.assert_array_equal(np.asarray(kv.layer(1).v), before)
    np.testing.assert_array_equal(np.asarray(changed.layer(0).v), np.asarray(kv.layer(0).v))
    with engine.create_session("s", layout=DP2) as session:
        session.push(changed)
        assert engine.generate_tokens(session, 1, ignore_eos=True).token_ids == (wanted,)


@pytest.mark.ci
def test_what_is_kept_in_fp8_is_compared_and_changed_as_values(
    golden: Expected, kv: KVCache
) -> None:
    with open_engine(NAME, kv_dtype="fp8") as engine:
        kept = engine.prefill(golden.prompt, layout=TP4)
    # of the first layer, which does not depend on what others keep
    np.testing.assert_allclose(kept.norms()[0], kv.norms()[0], rtol=1 / 16)
    values = np.asarray(kv.layer(0).v)
    again, other = kept.with_layer(0, v=values), kept.with_layer(0, v=-values)
    lengths = np.linalg.norm(values, axis=-1)
    assert (again.distances(kept)[0, 1] <= lengths / 16).all()
    np.testing.assert_allclose(other.distances(kept)[0, 1], 2 * lengths, rtol=1 / 16)
    assert not other.distances(kept)[1].any() and not other.distances(kept)[0, 0].any()
    same = kept.with_layer(0, v=kept.layer(0).v)
    assert not same.distances(kept).any(), "bytes are taken as they are"


def test_what_cannot_be_cut_joined_or_changed_is_refused_by_name(kv: KVCache) -> None:
    for wrong, message in ((slice(3, 3), r"kv\[3:3\] of 24"), (slice(0, 9, 2), "step 1"), (4, "4")):
        with pytest.raises(InvalidRequestError, match=message):
            kv[wrong]  # type: ignore[index]
    k = np.asarray(kv.layer(0).k)
    for index, components, message in (
        (2, {"k": k}, r"layer 2 must be in \[-2, 2\)"),
        (0, {"latent": k}, "no component 'latent'; it has k, v"),
        (0, {"k": k[:, 1:]}, r"'k' has shape \(2, 23, 8\); it must be \(2, 24, 8\)"),
        (0, {"k": k.astype(np.int32)}, "'k' is of type int32; KV is kept as float32"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            kv.with_layer(index, **components)
    other = replace(kv, spec=KVSpec.attention(2, 2, 8, "bfloat16"))
    for act in (kv.join, kv.distances):
        with pytest.raises(IncompatiblePeerError, match="geometry.*float32.*bfloat16"):
            act(other)
    with pytest.raises(InvalidRequestError, match="positions"):
        kv.distances(kv[:3])


_CUT = KVSpec(
    (
        KVLayer((KVComponent("k", 4, 6), KVComponent("v", 4, 10), KVComponent("index", 0, 12))),
        KVLayer((KVComponent("k", 2, 8), KVComponent("v", 2, 8)), window=5),
    ),
    "bfloat16",
)
_MIXED = KVSpec((KVLayer((KVComponent("k", 2, 8, "float32"), KVComponent("v", 2, 4))),), "bfloat16")


@pytest.mark.parametrize(
    ("spec", "shape", "rank"),
    [
        (KVSpec.attention(2, 4, 16, "float32"), (2, 4, 1), 1),
        (KVSpec.latent(1, 26, "bfloat16"), (1, 1, 4), 0),
        (_CUT, (2, 2, 2), 1),
        (_MIXED, (1, 2, 2), 0),
    ],
)
def test_components_that_are_put_into_blocks_are_read_back_whatever_they_are_made_of(
    spec: KVSpec, shape: tuple[int, int, int], rank: int
) -> None:
    """Heads of two widths, components without heads cut along their values, two types."""
    mesh = jax.make_mesh(shape, MESH_AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    place, draw = KVPlace(mesh, rank, spec), np.random.default_rng(3)
    for layer, kind in enumerate(spec.layers):
        given = {
            part.name: draw.normal(size=place.shape(part, 41)).astype(spec.dtype_of(part))
            for part in kind.components
        }
        blocks = place.put_layer(layer, 5, given)
        cut = [(block.start, block.valid_tokens, block.block_tokens) for block in blocks]
        assert cut == [(5, 16, 16), (21, 16, 16), (37, 9, 16)]
        assert all(block.array.shape[0] == shape[0] for block in blocks)
        for name, array in place.read_layer(layer, blocks).items():
            np.testing.assert_array_equal(np.asarray(array), given[name])
        middle = [part for block in blocks for part in block.within(20, 40)]
        for name, array in place.read_layer(layer, middle).items():
            np.testing.assert_array_equal(np.asarray(array), given[name][:, 15:35])
