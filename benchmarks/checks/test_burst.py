"""Half of the burst turns each pool once. Takes half a minute of processor time."""

from benchmarks.burst import ROLES, burst, followed, turns


def test_pools_follow_half_of_the_burst_there_and_back_without_swinging() -> None:
    run = followed(burst(high=4.0))
    assert run.result.pages_lost == 0
    assert {item.end for item in run.result.outcomes} == {"finished"}
    for role in ROLES:
        # the load of the end lies near the border of one and two
        assert max(run.sizes(role)) > 2 >= run.sizes(role)[-1], run.said
        assert turns(run.sizes(role)) == (1, 0), run.said
    assert run.within > 0.9, run.said
