"""What is left to compute, told by two sums, against counting every pair."""

import hypothesis.strategies as st
from hypothesis import given, settings

from jdisagg.scheduler.prompts import Backlog


def pairs(start: int, end: int) -> int:
    return sum(position + 1 for position in range(start, end))


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from(["add", "computed", "forget"]),
            st.integers(1, 40),
            st.integers(0, 39),
        )
    )
)
def test_the_sums_are_those_of_what_is_left_whatever_happened(steps) -> None:
    backlog, left = Backlog(), {}
    for key, step, tokens, cached in steps:
        if step == "add":
            cached = min(cached, tokens - 1)
            backlog.add(key, tokens, cached)
            left[key] = (cached, tokens)
        elif step == "computed":
            backlog.computed(key, tokens)
            if key in left:
                left[key] = (min(left[key][1], left[key][0] + tokens), left[key][1])
                if left[key][0] == left[key][1]:
                    del left[key]
        elif step == "forget":
            backlog.forget(key)
            left.pop(key, None)
        assert backlog.tokens == sum(end - start for start, end in left.values())
        assert backlog.pairs == sum(pairs(start, end) for start, end in left.values())
    for key in list(left):
        backlog.forget(key)
    assert (backlog.tokens, backlog.pairs) == (0, 0.0)
