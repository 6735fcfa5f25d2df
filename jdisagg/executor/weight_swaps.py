"""Replaces the weights of an instance while it serves, and frees them while it sleeps.

A thread reads a checkpoint onto the instance's devices, so that running steps continue.
`PutWeights` then replaces the arrays of every part between two steps. Programs get all weights as
arguments, so that no program is compiled again. This requires equal shapes and an equal
configuration, which are checked when the weights are read. Everything derived from a checkpoint
(reordered and quantized matrices, KV scales, the next-token layer) is computed while it is read."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from flax import nnx

from jdisagg.errors import InvalidRequestError, JdisaggError, UnavailableError
from jdisagg.executor.adapter_slots import adapter_size
from jdisagg.executor.page_pool import Pools
from jdisagg.executor.programs import Programs
from jdisagg.executor.weights import Part, Weights, split_model
from jdisagg.layout.axes import Layout
from jdisagg.layout.reshard_plan import Box, box_of
from jdisagg.messages.step_commands import (
    NO_ROOM,
    DiskResult,
    OfferWeights,
    PutWeights,
    ReadWeights,
    SleepMesh,
    StepCommand,
    WakeMesh,
)
from jdisagg.model_api import Device, Model
from jdisagg.ops.device_layout import kept_format
from jdisagg.scheduler.blocks import StageCut
from jdisagg.scheduler.executor import MeshLimits

SPARE = 0.02  # share of a device's memory that stays free while weights are read


@runtime_checkable
class WeightsSource(Protocol):
    """Reads checkpoint folders and offers of the served model."""

    def read(
        self,
        folder: str,
        layout: Layout,
        devices: Sequence[Device],
        cut: StageCut | None = None,
        check: Callable[[], None] = ...,
    ) -> tuple[str, Model]:
        """Reads weights onto devices, in their served form.

        Args:
            folder: Checkpoint folder, or name of an offer.
            cut: Divides the layers into several pipeline stages.
            check: Called often. Raises to end the reading.

        Returns:
            The fingerprint of the content, and the model.

        Raises:
            JdisaggError: The weights cannot be served, differ from their checksums, or changed
                during the reading.
        """
        ...


class WeightsOffer(Protocol):
    """Weights that are offered to other workers."""

    name: str

    def close(self) -> None: ...


MakeOffer = Callable[[Mapping[str, jax.Array], float, str], WeightsOffer]
"""Function that offers arrays to other workers. Arguments: the arrays by parameter name, the
seconds of the lease, and the fingerprint of the content."""


@dataclass
class _Staged:
    content: str
    model: Model
    weights: Weights
    nbytes: int


@dataclass
class _Reading:
    """The reading ends early when `dropped` is set."""

    number: int
    staged: "Future[_Staged]"
    dropped: threading.Event


class _NoRoom(InvalidRequestError):
    missing: int = 0


@dataclass
class WeightsReading:
    step: int
    done: "Future[_Staged] | Future[WeightsOffer]"
    in_order: bool = False

    def is_ready(self) -> bool:
        return self.done.done()

    def result(self) -> DiskResult:
        try:
            staged = self.done.result()
        except _NoRoom as error:
            return DiskResult(self.step, error.message, skipped=((NO_ROOM, error.missing),))
        except JdisaggError as error:
            return DiskResult(self.step, error.message)
        except Exception as error:  # whatever the files hold, the mesh serves on
            return DiskResult(self.step, f"weights: {type(error).__name__}: {error}")
        if not isinstance(staged, _Staged):
            return DiskResult(self.step, names=(staged.name.encode(),), ages=(0.0,))
        names = (staged.content.encode(),)
        return DiskResult(self.step, names=names, ages=(0.0,), bytes_moved=staged.nbytes)


@dataclass
class _Resting:
    """What a sleeping mesh keeps in host memory: copies of the model's arrays (None for an array
    that was dropped), and of the stacked LoRA weights."""

    model: "list[_HostArray] | None"
    stacks: "list[list[_HostArray]]"


class WeightSwaps:
    """The weights of all meshes of an instance. Used by the dispatch thread. `read` does not wait
    for the files.

    Attributes:
        source: Reader of new weights. With None, updates are refused.
        make_offer: Function that offers the weights to other workers, or None if the worker cannot.
        free_bytes: Returns the free memory of a device, or None if it is not limited.
    """

    def __init__(
        self,
        stages: Sequence[tuple[Programs, Weights, Pools]],
        model: Model,
        layout: Layout,
        limits: MeshLimits,
    ) -> None:
        self.source: WeightsSource | None = None
        self.make_offer: MakeOffer | None = None
        self.free_bytes = _free_bytes
        self._offers: list[Future[WeightsOffer]] = []
        first, self._weights, _ = stages[0]
        self._model, self._layout, self._limits = model, layout, limits
        self._pools = [pools for _, _, pools in stages]
        self._platform = first.platform
        meshes = [programs.mesh for programs, _, _ in stages]
        # The devices in the order of the argument of `layout_meshes`.
        self._devices = sorted(
            [device for mesh in meshes for device in mesh.devices.flat],
            key=lambda device: device.process_index,
        )
        held = tuple(weights.held for _, weights, _ in stages)
        self._cut: StageCut | None = None if len(held) == 1 else lambda _: held
        self._reading: _Reading | None = None
        self._resting: _Resting | None = None
        self._thread = ThreadPoolExecutor(1, f"{self._platform}-weights")

    def read(self, command: ReadWeights) -> WeightsReading:
        """Drops weights that were staged before."""
        self.drop()
        dropped = threading.Event()
        staged = self._thread.submit(self._read, command.folder, dropped)
        self._reading = _Reading(command.staged, staged, dropped)
        return WeightsReading(command.step, staged)

    def offer(self, command: OfferWeights) -> WeightsReading:
        assert isinstance(self._model, nnx.Module)
        named = {
            "/".join(map(str, path)): variable.get_value()
            for path, variable in nnx.to_flat_state(nnx.state(self._model))
        }
        able = self._resting is None and self._layout.pp == 1

        def make() -> WeightsOffer:
            if self.make_offer is None or not able:
                raise InvalidRequestError(
                    "weights: this worker cannot offer its weights; update from a folder"
                )
            return self.make_offer(named, command.lease_seconds, command.content)

        making = self._thread.submit(make)
        self._offers.append(making)
        return WeightsReading(command.step, making)

    def _end_offers(self) -> None:
        """Closes all offers, on the thread that made them."""
        for offer in self._offers:
            self._thread.submit(lambda offer=offer: offer.exception() or offer.result().close())
        self._offers.clear()

    def drop(self) -> None:
        """Frees staged weights, and ends a reading in progress."""
        if self._reading is not None:
            self._reading.dropped.set()
        self._reading = None

    def change(self, command: StepCommand) -> None:
        match command:
            case PutWeights():
                self._put(command.staged)
            case SleepMesh():
                self._sleep(command.keep)
            case WakeMesh():
                self._wake()
            case _:
                self.drop()

    def close(self) -> None:
        self.drop()
        self._end_offers()
        self._thread.shutdown(wait=False)

    # ---- new weights

    def _read(self, folder: str, dropped: threading.Event) -> _Staged:
        if self.source is None:
            raise InvalidRequestError(
                "weights: this worker cannot read a checkpoint, because it was started without"
                " --model; start the cluster's workers with --model"
            )

        def check() -> None:
            if dropped.is_set():
                raise UnavailableError(
                    f"weights {folder!r}: the reading ended early, because its update ended; update"
                    " again"
                )

        check()
        self._check_room()
        content, model = self.source.read(folder, self._layout, self._devices, self._cut, check)
        weights = split_model(model, self._layout, adapter_size(self._limits))
        self._check_form(folder, model, weights)
        nbytes = sum(_bytes_here(array) for array in _arrays(model))
        return _Staged(content, model, weights, nbytes)

    def _check_room(self) -> None:
        if self._resting is not None:  # pages are freed, and of the weights there is one copy
            return
        for device in self._devices:
            if device.process_index != jax.process_index():
                continue
            free = self.free_bytes(device)
            needed = sum(
                shard.data.nbytes
                for array in _arrays(self._model)
                for shard in getattr(array, "addressable_shards", ())
                if shard.device == device
            )
            if free is not None and free < needed:
                error = _NoRoom(
                    f"weights: {device} has {free:,} free bytes, and the new weights take"
                    f" {needed:,} beside the present ones; let the worker sleep (level 2) before"
                    " the update, or lower --memory_fraction"
                )
                error.missing = needed - free
                raise error

    def _check_form(self, folder: str, model: Model, weights: Weights) -> None:
        same = (
            model.vocabulary == self._model.vocabulary
            and model.kv_spec == self._model.kv_spec
            and (weights.width, weights.dtype) == (self._weights.width, self._weights.dtype)
            and len(weights.layers) == len(self._weights.layers)
            and (weights.next_token is None) is (self._weights.next_token is None)
            and len(weights.parts) == len(self._weights.parts)
        )
        if same:
            pairs = zip(self._weights.parts, weights.parts, strict=True)
            same = all(old.structure == new.structure for old, new in pairs)
        if not same:
            raise InvalidRequestError(
                f"weights {folder!r}: its model has another configuration or other shapes than the"
                " served one; weights are replaced only by those of the same config.json"
            )

    def _put(self, number: int) -> None:
        reading, self._reading = self._reading, None
        assert reading is not None and reading.number == number, "the worker read them before"
        self._end_offers()
        staged = reading.staged.result()
        for old, new in zip(self._weights.parts, staged.weights.parts, strict=True):
            leaves = list(new.leaves)
            for place in old.stacks:
                leaves[place.leaf] = old.leaves[place.leaf]
            old.leaves = tuple(leaves)
        _update(self._model, _arrays(staged.model))
        if self._resting is not None:
            self._resting.model = []

    # ---- sleep

    def _sleep(self, keep: bool) -> None:
        if self._resting is not None:
            return
        self._end_offers()
        arrays = _arrays(self._model)
        stacks = [
            [_HostArray(part.leaves[place.leaf]) for place in part.stacks]
            for part in self._weights.parts
        ]
        self._resting = _Resting([_HostArray(one) for one in arrays] if keep else None, stacks)
        for part in self._weights.parts:
            part.leaves = tuple(map(_abstract, part.leaves))
        _update(self._model, list(map(_abstract, arrays)))
        del arrays
        for pools in self._pools:
            pools.drop()

    def _wake(self) -> None:
        """Weights that were dropped at sleep have been read again by earlier commands."""
        resting, self._resting = self._resting, None
        if resting is None:
            return
        for pools in self._pools:
            pools.make()
        if resting.model:
            arrays = [one.on_device(self._platform) for one in resting.model]
            _update(self._model, arrays)
            again = split_model(self._model, self._layout)
            for part, base in zip(self._weights.parts, again.parts, strict=True):
                part.leaves = _merged(part, base.leaves)
        for part, kept in zip(self._weights.parts, resting.stacks, strict=True):
            leaves = list(part.leaves)
            for place, one in zip(part.stacks, kept, strict=True):
                leaves[place.leaf] = one.on_device(self._platform)
            part.leaves = tuple(leaves)


def _free_bytes(device: Device) -> int | None:
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit", 0)
    return int(limit * (1 - SPARE)) - stats.get("bytes_in_use", 0) if limit else None


class _HostArray:
    def __init__(self, array: jax.Array) -> None:
        self._shape, self._sharding = array.shape, array.sharding
        self._parts: dict[Box, np.ndarray] = {}
        for shard in array.addressable_shards:
            key = box_of(shard.index, array.shape)
            if key not in self._parts:
                self._parts[key] = np.array(shard.data, copy=True)

    def on_device(self, platform: str) -> jax.Array:
        sharding: Any = kept_format(len(self._shape), self._sharding, platform)  # type: ignore[arg-type]
        whole = (slice(None),) * len(self._shape)
        return jax.make_array_from_callback(
            self._shape, sharding, lambda index: self._parts[box_of(index or whole, self._shape)]
        )


def _merged(part: Part, base: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    stacks = {place.leaf for place in part.stacks}
    rest = iter(base)
    return tuple(
        leaf if number in stacks else next(rest) for number, leaf in enumerate(part.leaves)
    )


def _arrays(model: Model) -> list[jax.Array]:
    assert isinstance(model, nnx.Module)
    return jax.tree.leaves(nnx.state(model))


def _update(model: Model, arrays: Sequence[Any]) -> None:
    """Replaces the arrays of a model in place, because other objects refer to the model."""
    assert isinstance(model, nnx.Module)
    structure = jax.tree.structure(nnx.state(model))
    nnx.update(model, jax.tree.unflatten(structure, arrays))


def _abstract(array: Any) -> Any:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _bytes_here(array: jax.Array) -> int:
    return sum(shard.data.nbytes for shard in array.addressable_shards)
