"""Where a worker is called, its KV is taken and its weights are offered."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jdisagg import weights
from jdisagg.config import ServiceConfig
from jdisagg.errors import ConfigError
from jdisagg.messages.weights import OFFER_PREFIX
from jdisagg.node.kv_endpoint import called_address, kv_interface
from jdisagg.node.weights_reader import RemoteWeights
from jdisagg.settings.address import parse_host_port

ELSEWHERE = "192.0.2.7"  # of documentation: no interface has it


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


def test_a_worker_is_called_at_the_advertised_host_and_its_kv_takes_an_interface_it_has() -> None:
    every = ServiceConfig(host="0.0.0.0", port=8701)
    with pytest.raises(ConfigError, match=r"every interface.*add --advertise_host"):
        called_address(every)
    several = replace(every, advertise_host="127.0.0.1")
    assert (called_address(several), kv_interface(several)) == ("127.0.0.1:8701", "127.0.0.1")
    translated = replace(every, host="127.0.0.1", advertise_host=ELSEWHERE)
    assert (called_address(translated), kv_interface(translated)) == (
        f"{ELSEWHERE}:8701",
        "127.0.0.1",
    )
    assert kv_interface(replace(translated, kv_host="::1")) == "::1"
    with pytest.raises(ConfigError, match="means every interface"):
        replace(every, kv_host="0.0.0.0")
