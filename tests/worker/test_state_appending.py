"""A decode worker appends to a prefix of a model with recurrent state from a snapshot that it made
at the last whole block of an answer, over fake meshes that verify the state of each pass."""

import pytest

from tests.fakes.fake_states import with_state
from tests.worker.appends import appending, cluster
from tests.worker.conversations import SEEDS, Talk, storm
from tests.worker.states import check_snapshots, stateful


@SEEDS
@pytest.mark.parametrize("ranks", [1, 2])
async def test_what_is_appended_to_a_snapshot_changes_no_token(seed: int, ranks: int) -> None:
    decode = with_state(appending(ranks), snapshots=24, every=16)
    async with cluster(decode=decode, prefill=stateful(ranks), wire=True, seed=seed) as made:
        await storm(made, Talk(seed), requests=60, at_once=4, cancels=0.1)
        assert made.decode.counters["prompts_appended"] > 0
        assert check_snapshots(made) > 0
        assert sum(one.used for one in made.decode._state.residency.snapshots) > 0
