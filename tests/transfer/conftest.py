"""Both ends of the channel between processes, in one process. (Other suites of this folder have
`ends` of their own.)"""

from collections.abc import Iterator

import pytest

from jdisagg.transfer.negotiated_channel import NegotiatedChannel
from tests.transfer.conformance import Ends, ManualClock
from tests.transfer.loopback import RECEIVER, SENDER, Loopback, card


@pytest.fixture
def loopback() -> Loopback:
    return Loopback()


@pytest.fixture
def ends(loopback: Loopback) -> Iterator[Ends]:
    clock = ManualClock()
    for end in (SENDER, RECEIVER):
        loopback.channels[end] = NegotiatedChannel(clock, end, loopback.of(end), transports=2)
    sender, receiver = loopback.channels[SENDER], loopback.channels[RECEIVER]
    receiver.connect("", card(SENDER))
    yield Ends(sender, receiver, clock)
    receiver.close()
    sender.close()
