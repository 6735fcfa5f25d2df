"""Models and hardware of cost tests."""

from jdisagg.costs.hardware import Accelerator, Efficiency, Link
from jdisagg.costs.model_geometry import CostGeometry, GroupedAttention

FREE = Link("free", 1e30, 0.0, 1.0)
IDEAL = Accelerator(
    "ideal", 100e12, 1e12, 80e9, 8, FREE, FREE, FREE,
    Efficiency(1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0),
)  # fmt: skip


DENSE = CostGeometry("dense", 1024, 10, 32000, GroupedAttention(16, 4, 64), 4096)
