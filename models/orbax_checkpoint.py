"""Checkpoints in Orbax format. A checkpoint can be written from any parallel layout and restored
directly into the shardings of any other layout.

A directory holds `orbax/` (one array per parameter, named by its path) next to config.json and the
tokenizer's files. Arrays are stored as [in, out] with the unpadded vocabulary, independent of
platform and layout."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdisagg.errors import CheckpointError, JdisaggError
from jdisagg.layout.axes import Layout
from jdisagg.ops.parameters import param_logical_axes, weight_formats, weight_shardings
from jdisagg.settings.folders import made_folder
from models.decoder import Decoder
from models.parameter_tree import ParameterShape, parameter_shapes, with_arrays

_FOLDER = "orbax"
_COMPANIONS = ("*.json", "*.jinja", "additional_chat_templates/*.jinja", "*_Pooling/config.json")


@dataclass(frozen=True, slots=True)
class _Stored:
    name: str
    shape: tuple[int, ...]
    padded: tuple[int, ...]
    sharding: NamedSharding
    flipped: bool
    dtype: np.dtype


def is_orbax(directory: Path) -> bool:
    return (directory / _FOLDER).is_dir()


def save(model: Decoder, mesh: Mesh, layout: Layout, source: Path, destination: Path) -> None:
    """Raises CheckpointError if the destination already has weights."""
    check_destination(destination)
    arrays = jax.tree.leaves(nnx.state(model))
    stored = _stored_form(model, mesh, layout)
    tree = {
        part.name: _to_disk_form(array, part) for array, part in zip(arrays, stored, strict=True)
    }
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            checkpointer.save((destination / _FOLDER).absolute(), args=ocp.args.PyTreeSave(tree))
        if source.resolve() != destination.resolve():
            for path in (path for pattern in _COMPANIONS for path in source.glob(pattern)):
                if not path.name.endswith(".index.json"):  # of the safetensors files
                    copied = destination / path.relative_to(source)
                    copied.parent.mkdir(exist_ok=True)
                    shutil.copyfile(path, copied)
        _say_tied(destination / "config.json", model.config.tied)
    except OSError as error:
        raise CheckpointError(
            f"{destination} cannot be written: {error}; remove its contents and convert again"
        ) from error


def _say_tied(path: Path, tied: bool) -> None:
    """States in the copied config.json whether the head is the embedding, because the checkpoint's
    tensors decide that."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    if fields.get("tie_word_embeddings") is not tied:
        path.write_text(json.dumps(fields | {"tie_word_embeddings": tied}, indent=2) + "\n")


def check_destination(destination: Path) -> None:
    """Raises ConfigError if it cannot be created, CheckpointError if it already has weights."""
    if is_orbax(destination):
        raise CheckpointError(
            f"{destination} already holds an Orbax checkpoint; choose another directory or"
            " remove it"
        )
    made_folder("destination", destination)


def restore(directory: Path, model: Decoder, mesh: Mesh, layout: Layout) -> Decoder:
    """Returns `model`, an abstract model, with the stored weights. Each process reads only the
    slices of its own devices."""
    path = (directory / _FOLDER).absolute()
    stored = _stored_form(model, mesh, layout)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        try:
            _check(_shapes_on_disk(checkpointer, path), stored, directory)
            restore_args = {
                part.name: ocp.ArrayRestoreArgs(
                    sharding=part.sharding, global_shape=part.padded, dtype=part.dtype, strict=False
                )
                for part in stored
            }
            item = {
                part.name: jax.ShapeDtypeStruct(part.padded, part.dtype, sharding=part.sharding)
                for part in stored
            }
            tree = checkpointer.restore(
                path, args=ocp.args.PyTreeRestore(item=item, restore_args=restore_args)
            )
        except (JdisaggError, JaxRuntimeError, MemoryError):
            raise  # these errors already name the problem, or memory is short
        except Exception as error:  # Orbax raises bare Exceptions for TensorStore's read errors
            why = next(iter(str(error).splitlines()), type(error).__name__)
            raise CheckpointError(
                f"{path} cannot be read as an Orbax checkpoint ({why}); convert it again"
            ) from error
    formats = weight_formats(model, mesh, layout)
    return with_arrays(
        model,
        [
            _from_disk_form(tree.pop(part.name), part, to)
            for part, to in zip(stored, formats, strict=True)
        ],
    )


def _stored_form(model: Decoder, mesh: Mesh, layout: Layout) -> list[_Stored]:
    axes = param_logical_axes(model)
    shardings = weight_shardings(model, mesh, layout)
    return [
        _stored(parameter, names, sharding, mesh, model.vocabulary)
        for parameter, names, sharding in zip(parameter_shapes(model), axes, shardings, strict=True)
    ]


def _stored(
    parameter: ParameterShape,
    axes: Sequence[str],
    sharding: NamedSharding,
    mesh: Mesh,
    vocabulary: int,
) -> _Stored:
    flipped = parameter.transposed and len(parameter.shape) == 2
    order = slice(None, None, -1) if flipped else slice(None)
    plain = tuple(
        vocabulary if axis == "vocab" else size
        for axis, size in zip(axes, parameter.shape, strict=True)
    )
    spec = PartitionSpec(*tuple(sharding.spec)[order])
    name = ".".join(str(step) for step in parameter.path)
    return _Stored(
        name,
        plain[order],
        parameter.shape[order],
        NamedSharding(mesh, spec),
        flipped,
        parameter.dtype,
    )


def _to_disk_form(array: jax.Array, part: _Stored) -> jax.Array:
    if part.flipped:
        array = jax.jit(jnp.swapaxes, static_argnums=(1, 2), out_shardings=part.sharding)(
            array, 0, 1
        )
    if part.shape == part.padded:
        return array
    # The unpadded vocabulary may not be divisible by the number of shards, so it is written
    # unsharded.
    whole = NamedSharding(part.sharding.mesh, PartitionSpec())
    return jax.jit(
        partial(jax.lax.slice, start_indices=(0,) * array.ndim, limit_indices=part.shape),
        out_shardings=whole,
    )(array)


def _from_disk_form(array: jax.Array, part: _Stored, sharding: Any) -> jax.Array:
    if not part.flipped:
        return jax.device_put(array, sharding)  # a copy only where the order of axes differs
    return jax.jit(jnp.swapaxes, static_argnums=(1, 2), out_shardings=sharding)(array, 0, 1)


def _shapes_on_disk(checkpointer: ocp.Checkpointer, path: Path) -> dict[str, tuple[int, ...]]:
    item = checkpointer.metadata(path).item_metadata  # type: ignore[union-attr]
    if item is None:  # Orbax has logged why
        raise ValueError("its metadata is missing or damaged")
    return {name: tuple(leaf.shape) for name, leaf in item.tree.items()}


def _check(found: dict[str, tuple[int, ...]], stored: Sequence[_Stored], directory: Path) -> None:
    needed = {part.name: part.shape for part in stored}
    wrong = [
        f"{name} {shape} is {found.get(name, 'missing')}"
        for name, shape in needed.items()
        if found.get(name) != shape
    ]
    wrong += [f"{name} {shape} is unknown" for name, shape in found.items() if name not in needed]
    if wrong:
        raise CheckpointError(
            f"{directory}: the arrays do not fit its config.json: {'; '.join(wrong[:8])}; convert"
            " the checkpoint again"
        )
