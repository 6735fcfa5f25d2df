"""Google's published figures of a Trillium (v6e) chip and of half an Ironwood (TPU7x) chip, which
is one JAX device, with the slices by which libtpu can compile for them."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TpuDevice:
    """One JAX device of a TPU.

    Attributes:
        slices: Names of slices, as `topologies.get_topology_desc` takes them, by their number of
            devices.
        flops: Operations a second in bfloat16.
    """

    slices: Mapping[int, str]
    memory_bytes: int
    memory_bandwidth: float
    flops: float

    def slice_of(self, devices: int) -> str:
        """Returns the smallest slice with at least this number of devices."""
        enough = [count for count in sorted(self.slices) if count >= devices]
        if not enough:
            raise ValueError(f"no slice here has {devices} devices, at most {max(self.slices)}")
        return self.slices[enough[0]]


TPU_DEVICES = {
    "v6e": TpuDevice(
        {4: "v6e:2x2", 8: "v6e:2x4", 16: "v6e:4x4", 64: "v6e:8x8"},
        memory_bytes=32 << 30,
        memory_bandwidth=1.64e12,
        flops=918e12,
    ),
    "tpu7x": TpuDevice(
        {8: "tpu7x:2x2x1", 16: "tpu7x:2x2x2"},
        memory_bytes=96 << 30,
        memory_bandwidth=3.69e12,
        flops=1154e12,
    ),
}
