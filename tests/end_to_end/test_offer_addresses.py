"""Offers of weights at the addresses on which a server may listen."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg import weights
from jdisagg.address import parse_host_port
from jdisagg.config import ServiceConfig
from jdisagg.messages.weights import OFFER_PREFIX
from jdisagg.node.weights_reader import RemoteWeights


@pytest.mark.parametrize(
    "service",
    [
        ServiceConfig(host="::1", port=0),
        ServiceConfig(host="0.0.0.0", port=0, advertise_host="localhost"),
    ],
    ids=["ipv6", "a name"],
)
def test_an_offer_of_weights_is_read_at_the_address_that_its_name_has(
    service: ServiceConfig,
) -> None:
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    with weights.offer({"matrix": jnp.asarray(matrix)}, 60.0, service) as offered:
        host, _ = parse_host_port(
            offered.name.removeprefix(OFFER_PREFIX).partition("/")[0], "offer"
        )
        assert host == service.called_host
        reader = RemoteWeights(offered.name, ServiceConfig())
        try:
            array = reader.read("matrix", (slice(0, 3), slice(0, 4)))
        finally:
            reader.close()
    assert np.array_equal(array, matrix)
