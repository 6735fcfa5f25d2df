"""The research face: caches in the hand, moved between any two layouts, looked at, decoded from.

Oracles: greedy tokens that Hugging Face transformers gave for the same weights (tests/golden), keys
and values of a dense forward pass, and byte counts by arithmetic."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg.engine.research.face import DecoderLayout, Engine, PrefillLayout
from jdisagg.engine.research.kv_cache import KVCache
from jdisagg.errors import (
    BrokenModelError,
    ConfigError,
    InvalidRequestError,
    LayoutError,
    OverloadedError,
)
from jdisagg.layout.axes import Layout
from jdisagg.request import FinishReason
from tests.engine.research.research_engines import (
    CONTEXT_TOKENS,
    DP2,
    NAME,
    NEW_TOKENS,
    TP4,
    Expected,
    assert_same_kv,
    dense_pass,
    ledgers,
    open_engine,
)
from tests.lanes import first_quick

BOTH = DecoderLayout(dp=2, tp=2)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    first_quick([(TP4, DP2), (PrefillLayout(dp=2, tp=2), BOTH), (PrefillLayout(tp=1), BOTH)]),
)
def test_a_cache_pushed_to_another_layout_is_the_same_and_gives_the_same_tokens(
    engine: Engine, golden: Expected, prefill: Layout, decode: Layout
) -> None:
    kv = engine.prefill(golden.prompt, layout=prefill)
    with engine.create_session("s", layout=decode) as session:
        move = session.push(kv)
        assert_same_kv(engine.pull("s"), kv)
        blocks_bytes = -(-len(kv) // 16) * 16 * kv.spec.bytes_per_token
        replicas = decode.tp // session.mesh.shape["kv"]
        assert move.bytes_per_pair == move.planned
        assert move.bytes == blocks_bytes * replicas, (
            "disjoint meshes: each destination byte arrives once"
        )
        found, greedy = engine.generate_tokens(session, NEW_TOKENS).token_ids, golden.greedy
        assert found == tuple(greedy[:NEW_TOKENS])
        assert session.token_ids == (*golden.prompt, *found)
        assert session.next_token.token_id == greedy[NEW_TOKENS]
        # a decode mesh is a source like any other
        session.push(session.pull(), target_layout=DP2)
        more = engine.generate_tokens(session, 2).token_ids
        assert more == tuple(greedy[NEW_TOKENS : NEW_TOKENS + 2])


def test_keys_and_values_are_those_of_a_dense_forward_pass(
    engine: Engine, golden: Expected, kv: KVCache
) -> None:
    tokens = [*golden.prompt, *golden.greedy[:NEW_TOKENS]]
    with engine.create_session("s", layout=DP2) as session:
        session.push(kv)
        engine.generate_tokens(session, NEW_TOKENS)
        generated = session.pull()
    assert (len(generated), generated.layout) == (len(tokens), DP2)
    _, dense = dense_pass(NAME, tokens)
    for cache, (index, keys_values) in product((kv, generated), enumerate(dense)):
        layer = cache.layer(index)
        for found, want_TKH in zip((layer.k, layer.v), keys_values, strict=True):
            want_KTH = want_TKH.swapaxes(0, 1)[:, : len(cache)]
            np.testing.assert_allclose(np.asarray(found), want_KTH, atol=2e-5)
    heads_per_device = kv.layer(0).k.sharding.shard_shape(kv.layer(0).k.shape)[0]
    assert heads_per_device == 1, "two kv heads over four devices: one each, twice"
    assert kv.norms().shape == (2, 2, 2, len(kv))


def test_several_caches_and_sessions_live_at_once_and_a_cache_in_the_hand_never_changes(
    engine: Engine, golden: Expected
) -> None:
    first, second = (
        engine.prefill(prompt, layout=TP4) for prompt in (golden.prompt, golden.prompt[::-1])
    )
    before = np.asarray(first.layer(0).k)
    with engine.create_session("a", layout=DP2) as a, engine.create_session("b", layout=DP2) as b:
        a.push(first)
        b.push(second)
        half = engine.generate_tokens(a, 4)
        other = engine.generate_tokens(b, 4)
        rest = engine.generate_tokens(a, 4)
        assert half.token_ids + rest.token_ids == tuple(golden.greedy[:8])
        assert len(rest.step_seconds) == 4 and rest.finish_reason is FinishReason.LENGTH
        assert engine.generate_tokens(second, 4).token_ids == other.token_ids, (
            "decoding on the prefill mesh, from the cache alone"
        )
        assert b.pull().rank != a.pull().rank, "each took the rank with the most free pages"
        with engine.create_session("c", layout=first.layout, devices=jax.devices()[:4]) as c:
            assert c.push(first).bytes == 0, "the devices hold these bytes already"
        a.push(second)
        assert engine.generate_tokens(a, 4).token_ids == other.token_ids, (
            "what was pushed anew replaced what was there"
        )
    np.testing.assert_array_equal(np.asarray(first.layer(0).k), before)


def test_a_seeded_choice_does_not_depend_on_where_its_first_token_is_chosen(
    engine: Engine, golden: Expected, kv: KVCache
) -> None:
    seeded = {"temperature": 1.5, "seed": 7}
    with engine.create_session("s", layout=DP2) as session:
        streams = []
        for cache in (kv, engine.prefill(golden.prompt, layout=TP4, **seeded)):
            session.push(cache)
            streams.append(engine.generate_tokens(session, 6, **seeded).token_ids)
        assert streams[0] == streams[1] != tuple(golden.greedy[:6])
        assert session.next_token.logprobs is None


def test_generation_ends_where_the_context_does(engine: Engine) -> None:
    kv = engine.prefill([3] * (CONTEXT_TOKENS - 2), layout=TP4)
    with engine.create_session("s", layout=DP2) as session:
        session.push(kv)
        said = "max_new_tokens=5 and the 110 tokens so far exceed the context of 112; ask for at m"
        with pytest.raises(InvalidRequestError, match=said):
            engine.generate_tokens(session, 5)
        assert len(engine.generate_tokens(session).token_ids) == 2
        said = "session 's' holds 112 tokens, which is all of the context"
        for asked in (None, 5):
            with pytest.raises(InvalidRequestError, match=said):
                engine.generate_tokens(session, asked)
    with pytest.raises(InvalidRequestError, match="max_new_tokens=3 and the 110 tokens"):
        engine.generate_tokens(kv, 3)


def test_decoder_layouts_follow_from_dp_and_ep() -> None:
    assert PrefillLayout(tp=4, ep=4) == Layout(dp=1, tp=4, ep=4)
    assert DecoderLayout(dp=4, ep=16) == Layout(dp=4, tp=4, ep=16)
    assert DecoderLayout(dp=16, ep=16) == Layout(dp=16, tp=1, ep=16)
    assert DecoderLayout(dp=4) == Layout(dp=4)
    assert DecoderLayout(dp=2, tp=2) == Layout(dp=2, tp=2)
    for wrong in ({"dp": 4, "ep": 6}, {"dp": 0}, {"dp": 2, "ep": 0}, {"dp": 2, "tp": 2, "ep": 3}):
        with pytest.raises(LayoutError, match=str(list(wrong.values())[-1])):
            DecoderLayout(**wrong)


def test_what_cannot_be_is_refused_by_name(engine: Engine, kv: KVCache) -> None:
    with pytest.raises(LayoutError, match="needs dp \\* tp = 16 devices, and there are 8"):
        engine.create_session("s", layout=DecoderLayout(dp=16))
    with pytest.raises(ConfigError, match="no tokenizer"):
        engine.prefill("text")
    for prompt, message in (
        ([], "empty"),
        ([131], "131 is not a token id"),
        ([0.5], "0.5"),
        ([1] * 113, "113 tokens"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            engine.prefill(prompt, layout=TP4)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="'nobody' is not open"):
        engine.pull("nobody")
    session = engine.create_session("s", layout=DP2)
    with pytest.raises(InvalidRequestError, match="open already"):
        engine.create_session("s")
    with pytest.raises(InvalidRequestError, match="holds no KV"):
        engine.generate_tokens(session)
    with pytest.raises(InvalidRequestError, match="layer 2"):
        kv.layer(2)
    session.close()
    with pytest.raises(InvalidRequestError, match="closed"):
        session.push(kv)


def test_a_push_without_room_leaves_the_session_as_it_was(engine: Engine) -> None:
    long, short = (engine.prefill([5] * size, layout=TP4) for size in (CONTEXT_TOKENS, 1))
    sessions = [engine.create_session(str(number), layout=DP2) for number in range(9)]
    for session in sessions[:8]:
        session.push(long)
    with pytest.raises(OverloadedError, match="close sessions"):
        sessions[8].push(short)
    with pytest.raises(OverloadedError):
        sessions[0].push(short)
    assert sessions[0].token_ids == long.token_ids
    for session in sessions:
        session.close()


@pytest.mark.ci
def test_logits_that_are_not_finite_are_an_error_and_no_token() -> None:
    with open_engine("llama_biased") as engine:
        kv = engine.prefill([5, 6], layout=PrefillLayout(tp=1))
        session = engine.create_session("s", layout=DecoderLayout(dp=1))
        session.push(kv)
        for instance in engine.instances:
            table, *others = instance._stages[0].weights.stem.leaves
            poisoned = table.at[jnp.asarray([7, kv.next_token.token_id])].set(jnp.nan)
            object.__setattr__(instance._stages[0].weights.stem, "leaves", (poisoned, *others))
        with pytest.raises(BrokenModelError, match="not finite"):
            engine.prefill([5, 7, 6], layout=PrefillLayout(tp=1))
        with pytest.raises(BrokenModelError, match="not finite"):
            engine.generate_tokens(session, 4)
        with pytest.raises(BrokenModelError, match="not finite"):
            session.append([6, 7, 6])
        with pytest.raises(BrokenModelError, match="not finite"):
            engine.score([7, 6], after=kv)
        assert (session.token_ids, session.next_token) == ((5, 6), kv.next_token), (
            "a call that fails leaves the session as it was"
        )
        session.close()
        for ledger in ledgers(engine):
            assert ledger.free_pages == ledger.total_pages
