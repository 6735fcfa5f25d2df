"""A pull as a future that is polled, by itself."""

import jax
import jax.numpy as jnp
import pytest

from jdisagg.errors import HandoffError
from jdisagg.transfer.channel import Pull
from tests.fakes.manual_clock import ManualClock


def test_what_arrived_is_not_replaced_by_a_later_delivery() -> None:
    """A second sender process may say that it has nothing to add just when another thread finds
    that all is there."""
    pull = Pull(7, ManualClock(), 1.0)
    pieces = (jnp.ones(4), jnp.zeros(4))
    jax.block_until_ready(pieces)
    pull.deliver(pieces, 32, lambda arrays: (jnp.concatenate(arrays),))
    assert pull.is_ready()
    pull.deliver((), 0, lambda arrays: ())
    assert pull.failed() is None
    assert [array.shape for array in pull.arrays()] == [(8,)]
    assert pull.bytes_moved == 32


def test_a_delivery_after_the_end_keeps_nothing() -> None:
    clock = ManualClock()
    pull = Pull(7, clock, 1.0)
    clock.seconds += 2.0
    assert pull.is_ready()
    pull.deliver((jnp.ones(4),), 16)
    with pytest.raises(HandoffError, match="within the deadline"):
        pull.arrays()
