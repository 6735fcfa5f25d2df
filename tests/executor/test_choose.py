"""What the rows of a step choose from their logits, whatever the other rows ask for."""

import dataclasses
import itertools
import re
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jdisagg.executor.choose import Chosen, RowsToChoose, choose, read_row
from jdisagg.executor.slot_state import RowFormat
from jdisagg.messages.step_commands import BROKEN_TOKEN, NO_TOKEN, STUCK_TOKEN, SampleSpec
from jdisagg.model_api import Shards
from jdisagg.ops.embedding import gather_logits
from jdisagg.request import INT32, MAX_SEED, Grammar, GrammarKind, SamplingParams

ROWS, VOCABULARY = 12, 1001
WORDS = -(-VOCABULARY // 32)
FORMAT = RowFormat(1, VOCABULARY)
GREEDY, DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, seed=7, top_p=0.8)
SHAPED = SamplingParams(temperature=0.0, presence_penalty=2.0, logit_bias=((3, 50.0),))
SCORED = SamplingParams(temperature=0.0, logprobs=4)
MASKED = SamplingParams(temperature=0.0, grammar=Grammar(GrammarKind.REGEX, "a"))
LOGITS = np.random.default_rng(1).standard_normal((ROWS, VOCABULARY)).astype(np.float32)
FREE = np.full((ROWS, WORDS), 0xFFFFFFFF, np.uint32)


class _Batch(NamedTuple):
    logits: Any
    ints: Any
    floats: Any
    active: Any
    counts: Any
    masks: Any


def batch(rows: list[SamplingParams], masks: np.ndarray = FREE) -> _Batch:
    count = len(rows)
    ints = np.zeros((count, FORMAT.ints), np.int32)
    floats = np.zeros((count, FORMAT.floats), np.float32)
    for row, params in enumerate(rows):
        FORMAT.pack(ints[row], floats[row], SampleSpec(0, params))
    counts = np.zeros((count, VOCABULARY), np.int32)
    return _Batch(LOGITS[:count], ints, floats, np.ones(count, bool), counts, masks[:count])


ALONE = Shards()


def body(rows: _Batch, shards: Shards = ALONE) -> Chosen:
    position_B = jnp.full(len(rows.ints), 9, jnp.int32)
    to_choose = RowsToChoose(rows.ints, rows.floats, position_B, rows.active, rows.masks)
    return choose(FORMAT, rows.logits, to_choose, lambda: rows.counts, shards)


run = jax.jit(body)


def tokens(rows: _Batch) -> list[int]:
    return np.asarray(run(rows).token).tolist()


def test_the_largest_parameters_of_a_request_fit_into_a_row() -> None:
    params = SamplingParams(INT32, 100.0, INT32, seed=MAX_SEED, min_tokens=INT32)
    ints, floats = np.zeros(FORMAT.ints, np.int32), np.zeros(FORMAT.floats, np.float32)
    FORMAT.pack(ints, floats, SampleSpec(0, params, min_position=9 + INT32))
    assert FORMAT.shaping(ints[None], floats[None]).min_position == INT32


def test_a_row_chooses_the_same_whatever_the_other_rows_ask_for() -> None:
    """Each feature is computed for all rows, as soon as one asks for it."""
    kinds = (GREEDY, DRAWN, SHAPED, SCORED, MASKED)
    alone = [tokens(batch([own] * ROWS))[::2] for own in kinds]
    for (own, expected), other in itertools.product(zip(kinds, alone, strict=True), kinds):
        assert tokens(batch([own, other] * (ROWS // 2)))[::2] == expected, (own, other)


def test_features_are_those_of_their_rows() -> None:
    likeliest = LOGITS.argmax(1).tolist()
    assert tokens(batch([GREEDY] * ROWS)) == likeliest
    assert tokens(batch([SHAPED] * ROWS)) == [3] * ROWS, "its bias is the largest"
    seeds = [SamplingParams(temperature=0.9, seed=seed) for seed in range(ROWS)]
    drawn = tokens(batch(seeds))
    assert len(set(drawn)) > ROWS // 2 and drawn != likeliest


def test_a_row_that_asks_gets_log_probabilities() -> None:
    scores = np.asarray(run(batch([GREEDY, SCORED] * (ROWS // 2))).scores)
    logprob, pairs = read_row(scores[1], 4)
    exact = LOGITS[1].astype(np.float64)
    exact -= np.log(np.exp(exact).sum())
    order = np.argsort(-exact, kind="stable")[:4]
    assert [token for token, _ in pairs] == order.tolist()
    np.testing.assert_allclose([value for _, value in pairs], exact[order], atol=1e-4)
    assert logprob == pytest.approx(exact.max(), abs=1e-4)


def test_rows_that_compute_nothing_ask_for_nothing() -> None:
    rows = batch([GREEDY, SCORED] * (ROWS // 2))
    rows.active[1::2] = False
    chosen = run(rows)
    assert set(np.asarray(chosen.token)[1::2].tolist()) == {NO_TOKEN}
    assert not np.asarray(chosen.scores).any()


def test_broken_logits_give_their_row_an_error_and_spare_the_others() -> None:
    for params in (GREEDY, DRAWN):
        rows = batch([params] * ROWS)
        logits = rows.logits.copy()
        logits[1, 5] = np.nan
        broken = tokens(rows._replace(logits=logits))
        assert broken == [*tokens(rows)[:1], BROKEN_TOKEN, *tokens(rows)[2:]]


def test_a_step_computes_a_feature_only_if_a_row_has_it() -> None:
    """Conditions that XLA turned into selects would compute all features in each step: any feature,
    shaping and masks, drawing with top-k and top-p, log-probabilities."""
    text = run.lower(batch([GREEDY] * ROWS)).compile().as_text()
    assert text and text.count(" conditional(") == 6


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(ROWS, id="shared"),
        pytest.param(6, id="not a multiple of tp", marks=pytest.mark.ci),
    ],
)
def test_devices_of_tp_share_the_rows_and_no_collective_is_in_a_condition(rows: int) -> None:
    whole = [SHAPED, DRAWN, SCORED, GREEDY, MASKED, DRAWN] * (ROWS // 6)
    given = batch(whole[:rows])
    mesh, tp = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("kv", "rep")), ("kv", "rep")
    vocabulary = 4 * -(-VOCABULARY // 4)
    padding = ((0, 0), (0, vocabulary - VOCABULARY))

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(None, tp), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    def by_devices(part_BV: jax.Array, rows: _Batch) -> Chosen:
        apart = len(part_BV) % 4 == 0
        own_BV = gather_logits(part_BV, VOCABULARY, tp, apart=apart)[:, :VOCABULARY]
        return body(rows._replace(logits=own_BV), Shards(tp=tp))

    padded = np.pad(given.logits, padding)
    compiled = by_devices.lower(padded, given).compile()
    expected, found = run(batch(whole)), compiled(padded, given)
    np.testing.assert_array_equal(found.token, expected.token[:rows])
    np.testing.assert_array_equal(found.scores[2], expected.scores[2])
    text = compiled.as_text()
    assert text and text.count("all-to-all(") == (rows == ROWS)
    inner = text[: text.index("ENTRY")]
    assert not re.search(r"all-(gather|to-all|reduce)\(", inner)


def test_a_mask_leaves_its_row_what_it_allows_and_other_rows_what_they_had() -> None:
    every = [
        SamplingParams(temperature=0.9 * (row % 3 > 0), seed=70 + row, top_k=row)
        for row in range(ROWS)
    ]
    masks = FREE.copy()
    masks[0::4] = 0
    masks[0::4, 7] = 0b1000  # id 7 * 32 + 3 alone
    masks[1::4] = 0  # nothing
    bound = [
        dataclasses.replace(params, grammar=MASKED.grammar) if row % 4 < 2 else params
        for row, params in enumerate(every)
    ]
    free, masked = tokens(batch(every)), tokens(batch(bound, masks))
    assert masked[0::4] == [7 * 32 + 3] * 3
    assert masked[1::4] == [STUCK_TOKEN] * 3
    assert (masked[2::4], masked[3::4]) == (free[2::4], free[3::4])
