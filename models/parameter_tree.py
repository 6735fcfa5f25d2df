"""Converts a model's parameters to a flat list of paths and shapes, and back, for all checkpoint
formats."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from flax import nnx

from models.decoder import Decoder

ParameterPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """Path and shape of a parameter. `transposed` means that the parameter is a matrix [out, in],
    as in Hugging Face tensors, instead of [in, out]."""

    path: ParameterPath
    shape: tuple[int, ...]
    transposed: bool
    dtype: np.dtype


def parameter_shapes(model: nnx.Module) -> tuple[ParameterShape, ...]:
    shapes = []
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        owner: object = model
        for step in path[:-1]:
            owner = owner[step] if isinstance(step, int) else getattr(owner, str(step))  # type: ignore[index]
        shapes.append(
            ParameterShape(
                tuple(step if isinstance(step, int) else str(step) for step in path),
                tuple(variable.get_value().shape),
                bool(getattr(owner, "transposed", False)),
                np.dtype(variable.get_value().dtype),
            )
        )
    return tuple(shapes)


def path_name(path: ParameterPath) -> str:
    """Returns the name under which a worker offers a parameter to other workers."""
    return "/".join(map(str, path))


def with_arrays(model: Decoder, arrays: Sequence[jax.Array]) -> Decoder:
    """Returns the model with these parameters, given in the order of `jax.tree.leaves`."""
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(state), arrays))
