"""Descriptions of GPUs that XLA needs to compile for them without a GPU: NVIDIA's published figures
of an H200 and of a GB200 device, in the text form of XLA's `GpuTargetConfig`.

A GPU provides its own description:
`jaxlib.xla_client.get_topology_for_devices(jax.devices()).target_config`. Rates are per
multiprocessor and clock cycle; XLA's cost model uses them to choose fusions."""

from collections.abc import Mapping
from dataclasses import dataclass

# XLA's numbers of primitive types
_S8, _U8, _F16, _F32, _F64, _BF16, _F8E5M2, _F8E4M3FN = 2, 6, 10, 11, 12, 16, 19, 20


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """One kind of GPU. `tensor_rates`: operations per clock cycle of one tensor core, by XLA's
    number of the data type."""

    kind: str
    compute_major: int
    cores: int
    memory_bytes: int
    memory_bandwidth: int
    l2_bytes: int
    clock_ghz: float
    tensor_rates: Mapping[int, int]

    def target_config(self) -> str:
        """Returns the text of the protocol buffer that `topologies.get_topology_desc` takes."""
        scalar = {_S8: (64, 1), _F16: (128, 2), _F32: (128, 1), _F64: (64, 1), _BF16: (128, 2)}
        tensor = {kind: (4, rate) for kind, rate in self.tensor_rates.items()}
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 << 10}
  shared_memory_per_core: {228 << 10}
  shared_memory_per_block_optin: {227 << 10}
  threads_per_core_limit: 2048
  core_count: {self.cores}
  fpus_per_core: 128
  block_dim_limit_x: {(1 << 31) - 1}
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {self.memory_bandwidth}
  l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  cuda_compute_capability {{ major: {self.compute_major} feature_extension: ACCELERATED_FEATURES }}
  scalar_unit_description {{ {self._rates(scalar)} }}
  matrix_unit_description {{ {self._rates(tensor)} }}
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability {self.compute_major}.0a"
  model_str: "sm_{self.compute_major}.0a"
  device_address_bits: 64
  pcie_bandwidth: {32 << 30}
  ecc_enabled: true
  name: "{self.kind}"
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
  cub_version: "3.1.2"
  device_interconnect_info {{ active_links: 18 }}
  collective_memory_granularity: {2 << 20}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.kind}"
"""

    def _rates(self, units: Mapping[int, tuple[int, int]]) -> str:
        return " ".join(
            f"rate_infos {{ key: {kind} value {{ clock_rate_ghz: {self.clock_ghz}"
            f" units_per_core: {count} ops_per_clock: {rate} }} }}"
            for kind, (count, rate) in units.items()
        )


GPU_DEVICES = {
    "h200": GpuDevice(
        "NVIDIA H200",
        compute_major=9,
        cores=132,
        memory_bytes=141 << 30,
        memory_bandwidth=4_800_000_000_000,
        l2_bytes=50 << 20,
        clock_ghz=1.98,
        tensor_rates={
            _S8: 1024, _U8: 1024, _F16: 512, _F32: 256, _F64: 32, _BF16: 512,
            _F8E5M2: 1024, _F8E4M3FN: 1024,
        },
    ),
    "gb200": GpuDevice(
        "NVIDIA GB200",
        compute_major=10,
        cores=152,
        memory_bytes=184 << 30,
        memory_bandwidth=8_000_000_000_000,
        l2_bytes=126 << 20,
        clock_ghz=2.06,
        tensor_rates={
            _S8: 2048, _U8: 2048, _F16: 1024, _F32: 512, _F64: 16, _BF16: 1024,
            _F8E5M2: 2048, _F8E4M3FN: 2048,
        },
    ),
}  # fmt: skip
