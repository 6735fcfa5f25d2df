"""Model parameters: arrays with named dimensions, and their shardings under a layout.

Each parameter is an `nnx.Param` with the metadata `logical_axes`: one name per dimension, from the
table in `layout/axes.py`. Flax's own sharding annotations are not used, because they constrain
eagerly and our programs run on local shards inside `shard_map`. Leaves are always in the order of
`jax.tree.leaves(nnx.state(module))`."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, get_args

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdisagg.errors import LayoutError
from jdisagg.layout.axes import MESH_AXES, Layout, LogicalAxis
from jdisagg.model_api import Device
from jdisagg.ops.device_layout import kept_format

Axes = tuple[LogicalAxis, ...]
# Data types of parameters whose type is not the model's: biases, scales and quantized matrices.
TypeRole = Literal["float32", "int8", "uint8", "int4", "float8_e4m3fn"]
TYPE_ROLES: tuple[TypeRole, ...] = get_args(TypeRole)
Role = Literal["matrix", "embedding", "norm", "bias", TypeRole]


# Function from a parameter's path to the mesh of the pipeline stage that has the parameter.
StageOf = Callable[[tuple[Any, ...]], Mesh]


class Make(Protocol):
    """Function that creates the value of a parameter: an array, or a shape for abstract models.
    Random matrices have variance 1 / `fan_in`."""

    def __call__(
        self, shape: tuple[int, ...], role: Role, fan_in: int
    ) -> jax.Array | jax.ShapeDtypeStruct: ...


def parameter(value: jax.Array | jax.ShapeDtypeStruct, axes: Axes) -> nnx.Param[jax.Array]:
    if len(axes) != len(value.shape):
        raise ValueError(
            f"parameter of shape {value.shape} needs one logical axis per dimension, got {axes}"
        )
    return nnx.Param(value, logical_axes=axes)  # type: ignore[return-value]  # an abstract model holds shapes


def param_logical_axes(module: nnx.Module) -> tuple[Axes, ...]:
    variables = jax.tree.leaves(nnx.state(module), is_leaf=_is_variable)
    return tuple(variable.get_metadata()["logical_axes"] for variable in variables)


def param_specs(module: nnx.Module, layout: Layout) -> tuple[PartitionSpec, ...]:
    """Returns each parameter's partition over the mesh axes ("dp", "kv", "rep"), in the order of
    `jax.tree.leaves`. Used as in_specs of `shard_map`."""
    table = layout.axis_table()
    return tuple(
        PartitionSpec(*(table[axis] or None for axis in axes))
        for axes in param_logical_axes(module)
    )


def weight_shardings(module: nnx.Module, mesh: Mesh, layout: Layout) -> tuple[NamedSharding, ...]:
    return tuple(NamedSharding(mesh, spec) for spec in param_specs(module, layout))


def weight_formats(
    module: nnx.Module, mesh: Mesh, layout: Layout, later: StageOf | None = None
) -> tuple[Any, ...]:
    """Returns the sharding of each parameter, in the order of `jax.tree.leaves`. On some platforms
    it includes the order of axes in memory (`jax.experimental.layout.Format`).

    Args:
        later: Function from a parameter's path to the mesh of its pipeline stage. None puts all
            parameters on `mesh`.
    """
    platform = mesh.devices.flat[0].platform
    axes = (len(axes) for axes in param_logical_axes(module))
    shardings = weight_shardings(module, mesh, layout)
    if later is not None:
        paths = (path for path, _ in nnx.to_flat_state(nnx.state(module)))
        shardings = tuple(
            NamedSharding(later(path), sharding.spec)
            for path, sharding in zip(paths, shardings, strict=True)
        )
    return tuple(map(kept_format, axes, shardings, [platform] * len(shardings)))


def layout_meshes(layout: Layout, kv_heads: int, devices: Sequence[Device]) -> tuple[Mesh, ...]:
    """Builds the mesh of each pipeline stage of an instance on exactly these devices, with the axes
    ("dp", "kv", "rep"). The first stage gets the first devices.

    If the devices belong to several processes, each stage gets devices of every process. All
    processes thus run the programs of all stages, in the same order, and activations stay within a
    process."""
    shape = layout.mesh_shape(kv_heads)
    if len(devices) != layout.devices:
        raise LayoutError(
            f"layout {layout} needs {layout.devices} devices, got {len(devices)}; give as many as"
            " dp * tp * pp"
        )
    processes = len({device.process_index for device in devices}) if layout.pp > 1 else 1
    if layout.stage_devices % processes:
        raise LayoutError(
            f"layout {layout} over {processes} processes: each pipeline stage needs devices of"
            f" every process, and has dp * tp = {layout.stage_devices}; choose a multiple of"
            f" {processes}, or one process"
        )
    # [process, stage, device] to [stage, process, device]
    grid = np.array(devices, dtype=object).reshape(processes, layout.pp, -1)
    return tuple(Mesh(stage.reshape(shape), MESH_AXES) for stage in grid.swapaxes(0, 1))


def layout_mesh(layout: Layout, kv_heads: int, devices: Sequence[Device]) -> Mesh:
    (mesh,) = layout_meshes(layout, kv_heads, devices)
    return mesh


def _is_variable(node: object) -> bool:
    return isinstance(node, nnx.Variable)
