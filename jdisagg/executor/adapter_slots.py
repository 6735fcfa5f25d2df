"""The LoRA adapter slots of an instance: reads adapters into device memory, and writes them into
slots.

A thread reads the files and puts each device's shards on the device, while steps run. The command
`PutAdapter` then writes the adapter into one slot of every layer, between two steps. The slots of a
matrix are stacked in one array, which programs receive with the weights (`executor/weights.py`).
The arrays' shapes are fixed, so that no program is compiled for an adapter."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jdisagg.errors import InvalidRequestError, JdisaggError
from jdisagg.executor.programs import Programs
from jdisagg.executor.weights import Part, Weights
from jdisagg.messages.step_commands import DiskResult, PutAdapter, ReadAdapter
from jdisagg.model_api import AdapterContent, AdapterSize, Model
from jdisagg.scheduler.executor import MeshLimits

# The new contents of one adapter slot: for each layer, one array for each of its factor stacks.
_Staged = list[list[jax.Array]]


@dataclass
class AdapterReading:
    step: int
    done: "Future[_Staged]"
    in_order: bool = False

    def is_ready(self) -> bool:
        return self.done.done()

    def result(self) -> DiskResult:
        try:
            staged = self.done.result()
            nbytes = sum(array.nbytes for layer in staged for array in layer)
            return DiskResult(self.step, bytes_moved=nbytes)
        except JdisaggError as error:
            return DiskResult(self.step, error.message)
        except OSError as error:
            return DiskResult(self.step, f"adapter: {error}; check the folder on the worker's host")


class AdapterSlots:
    """The adapter slots of all layers. Used by the dispatch thread. `read` does not wait for the
    files."""

    def __init__(
        self, stages: Sequence[tuple[Programs, Weights]], model: Model, limits: MeshLimits
    ) -> None:
        self._model, self._size = model, adapter_size(limits)
        self._layers = [
            (programs, weights.layers[index])
            for programs, weights in stages
            for index in weights.held
        ]
        self._reads: dict[str, Future[_Staged]] = {}
        self._thread = ThreadPoolExecutor(1, f"{stages[0][0].platform}-adapters")

    def read(self, command: ReadAdapter) -> AdapterReading:
        """The reading fails if the digest of the files differs from the command's digest."""
        reading = self._reads[command.digest] = self._thread.submit(self._read, command)
        return AdapterReading(command.step, reading)

    def put(self, command: PutAdapter) -> None:
        """Waits until the adapter is read."""
        self._put_all(self._reads.pop(command.digest).result(), command.slot)

    def warm_up(self) -> None:
        """Compiles the programs of `put`, by writing an adapter of zeros into the last slot."""
        nothing = AdapterContent("", ({},) * len(self._layers))
        self._put_all(self._stage(nothing), self._size.slots)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _read(self, command: ReadAdapter) -> _Staged:
        content = self._model.read_adapter(Path(command.path), self._size)
        if content.digest != command.digest:
            raise changed_error(command.path, content.digest, command.digest)
        return self._stage(content)

    def _stage(self, content: AdapterContent) -> _Staged:
        return [
            self._staged_layer(programs, part, layer)
            for (programs, part), layer in zip(self._layers, content.layers, strict=True)
        ]

    def _staged_layer(self, programs: Programs, part: Part, layer: Any) -> list[jax.Array]:
        arrays = []
        for place in part.stacks:
            leaf, spec = part.leaves[place.leaf], part.specs[place.leaf]
            axis = place.slot_axis
            shape = leaf.shape[:axis] + leaf.shape[axis + 1 :]
            found = layer.get(place.module)
            host = np.zeros(shape, leaf.dtype)
            if found is not None:
                rows = found[0] if place.factor == "a" else found[1]
                # Of all dimensions, only the adapter's rank is padded.
                host[tuple(slice(0, size) for size in rows.shape)] = rows
            sharding = NamedSharding(programs.mesh, _of_one_slot(spec, axis))
            arrays.append(jax.make_array_from_callback(shape, sharding, lambda at, h=host: h[at]))
        return arrays

    def _put_all(self, staged: _Staged, slot: int) -> None:
        for (programs, part), new in zip(self._layers, staged, strict=True):
            self._put(programs, part, new, slot)

    def _put(self, programs: Programs, part: Part, new: Sequence[jax.Array], slot: int) -> None:
        axes = tuple(place.slot_axis for place in part.stacks)
        stacks = [part.leaves[place.leaf] for place in part.stacks]
        number = programs.put(np.full((programs.mesh.shape["dp"],), slot - 1, np.int32))

        def body(stacks: Any, new: Any, slot: jax.Array) -> Any:
            return [
                jax.lax.dynamic_update_slice_in_dim(
                    stack, jnp.expand_dims(each, axis), slot[0], axis
                )
                for stack, each, axis in zip(stacks, new, axes, strict=True)
            ]

        specs = [part.specs[place.leaf] for place in part.stacks]
        own = [_of_one_slot(spec, axis) for spec, axis in zip(specs, axes, strict=True)]
        build = lambda: programs.compile(  # noqa: E731
            body, (stacks, list(new), number), (specs, own, PartitionSpec("dp")), specs, donate=(0,)
        )
        key = "adapter", tuple((stack.shape, str(stack.dtype)) for stack in stacks), tuple(specs)
        out = programs.get(key, build)(stacks, list(new), number)
        leaves = list(part.leaves)
        for place, stack in zip(part.stacks, out, strict=True):
            leaves[place.leaf] = stack
        part.leaves = tuple(leaves)


def _of_one_slot(spec: PartitionSpec, axis: int) -> PartitionSpec:
    return PartitionSpec(*spec[:axis], *spec[axis + 1 :])


def adapter_size(limits: MeshLimits) -> AdapterSize:
    return AdapterSize(limits.adapters, limits.adapter_rank, limits.adapter_experts)


def changed_error(path: str, found: str, wanted: str) -> JdisaggError:
    return InvalidRequestError(
        f"adapter {Path(path).name!r}: its files changed since it was loaded (digest {found[:12]},"
        f" not {wanted[:12]}); load it again"
    )
