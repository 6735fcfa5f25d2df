"""Maps the modules of a LoRA adapter to the matrices of a model.

The rules that find a matrix in a checkpoint (`hf_weights.py`) also find its LoRA factors A and B.
If a parameter consists of some rows of a stored matrix, its adapter has the corresponding rows of
B, and all of A. For routed experts, the file has factors per expert, or PEFT's joint factors of all
experts of a layer."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from flax import nnx

from jdisagg.errors import InvalidRequestError
from jdisagg.model_api import AdapterContent, AdapterSize, ModulePath
from models.decoder import Decoder
from models.feed_forward import SparseMLP
from models.gated_delta import GatedDeltaNet
from models.hf_sources import Rows, SomeRows, Whole
from models.hf_weights import EXPERTS, RENAMED, find_source
from models.linear import Linear
from models.mamba2 import Mamba2
from models.parameter_tree import ParameterShape
from models.peft_folder import (
    PeftConfig,
    StoredFactors,
    adapter_digest,
    read_factors,
    read_peft_config,
)
from models.safetensors_files import renamed

_LISTED = 4
_TEXT = (("model.language_model.", "model."), ("language_model.", ""))
# Names of the PEFT modules with the factors of all experts: those of gate and up, or of down.
_ALL_EXPERTS = ("mlp.experts.base_layer", "mlp.experts", "block_sparse_moe.experts.base_layer",
                "block_sparse_moe.experts")  # fmt: skip
_GATE_UP, _DOWN = "gate_up_proj", "down_proj"

Pair = tuple[np.ndarray, np.ndarray]


def read_adapter(directory: Path, size: AdapterSize, model: Decoder) -> AdapterContent:
    """Raises InvalidRequestError if the adapter does not fit the model or the slots of `size`."""
    found = _Found(directory, size, model)
    layers = tuple([dict(found.of_layer(index)) for index in range(len(model.layers))])
    found.check_all_used()
    return AdapterContent(adapter_digest(directory), layers)


class _Found:
    def __init__(self, directory: Path, size: AdapterSize, model: Decoder) -> None:
        self._directory, self._size, self._model = directory, size, model
        self._config: PeftConfig = read_peft_config(directory)
        renames = (*_TEXT, *RENAMED.get(model.config.family, ()))
        stored = read_factors(directory)
        # Names of the modules in the adapter's files, which its patterns refer to.
        self._stated = {renamed(name, renames): name for name in stored}
        self._factors = {name: stored[stated] for name, stated in self._stated.items()}
        self._shapes = {f"{name}.weight": _shape(each) for name, each in self._factors.items()}
        self._used: set[str] = set()

    def of_layer(self, index: int) -> Iterator[tuple[ModulePath, Pair]]:
        layer = self._model.layers[index]
        recurrent = isinstance(layer.attention, GatedDeltaNet | Mamba2)
        for name, part in (("attention", layer.attention), ("mlp", layer.mlp)):
            if part is None or (name == "attention" and recurrent):
                continue
            for inner, module in nnx.iter_modules(part):
                path = (name, *map(str, inner))
                if isinstance(module, Linear):
                    yield from self._of_linear(index, path, module)
                elif isinstance(module, SparseMLP) and self._size.experts:
                    yield from self._of_experts(f"model.layers.{index}.", path, module)

    def check_all_used(self) -> None:
        if left := sorted(self._factors.keys() - self._used):
            experts = any(".experts" in name for name in left) and not self._size.experts
            listed = f"{', '.join(left[:_LISTED])}{' ...' * (len(left) > _LISTED)}"
            raise self._error(
                f"these modules of {self._model.config.family} take no adapter: {listed}",
                "start the server with --adapter_experts"
                if experts
                else "train it on linear layers of attention and feed-forward blocks",
            )

    def _of_linear(
        self, index: int, path: ModulePath, module: Linear
    ) -> Iterator[tuple[ModulePath, Pair]]:
        (_, into), (_, out) = module.ends
        where = ("layers", index, *path, "kernel")
        shape = ParameterShape(where, (into, out), False, np.dtype("float32"))
        source = find_source(shape, self._model.config, self._shapes)
        if not isinstance(source, Whole | Rows | SomeRows) or source.name not in self._shapes:
            return
        name, needed = source.name.removesuffix(".weight"), source.needs()[source.name]
        each = self._take(name, needed)
        stated = self._stated[name]
        rank = self._checked_rank(name, each.a.shape[0], self._config.rank_of(stated))
        b_RO = source.read(lambda _, part: each.b[part], (slice(0, rank), slice(0, out)))
        yield (*path, "adapter"), (each.a.T, self._scaled(b_RO, stated))

    def _of_experts(
        self, prefix: str, path: ModulePath, module: SparseMLP
    ) -> Iterator[tuple[ModulePath, Pair]]:
        experts, into, out = module.sizes
        for key, shape in (("gate", (out, into)), ("up", (out, into)), ("down", (into, out))):
            pair = self._of_each_expert(prefix, key, experts, shape)
            if pair is not None:
                yield (*path, f"{key}_adapter"), pair
        for name in (prefix + end for end in _ALL_EXPERTS):
            if name not in self._factors or module.gate is None:
                continue
            if _shape(self._factors[name]) == (into, out):
                pair = self._of_all_experts(name, _DOWN, experts, (into, out))
                yield (*path, "down_adapter"), pair
            else:
                a, b = self._of_all_experts(name, _GATE_UP, experts, (2 * out, into))
                yield (*path, "gate_adapter"), (a, b[:, :, :out])
                yield (*path, "up_adapter"), (a, b[:, :, out:])

    def _of_each_expert(
        self, prefix: str, key: str, experts: int, shape: tuple[int, int]
    ) -> Pair | None:
        for pattern in EXPERTS[f"mlp.{key}"]:
            names = [
                prefix + pattern.format(expert=expert).removesuffix(".weight")
                for expert in range(experts)
            ]
            some = {number: name for number, name in enumerate(names) if name in self._factors}
            if not some:
                continue
            a = np.zeros((experts, shape[1], self._size.rank), np.float32)
            b = np.zeros((experts, self._size.rank, shape[0]), np.float32)
            for number, name in some.items():
                each, stated = self._take(name, shape), self._stated[name]
                rank = self._checked_rank(name, each.a.shape[0], self._config.rank_of(stated))
                a[number, :, :rank] = each.a.T
                b[number, :rank] = self._scaled(each.b.T, stated)
            return a, b
        return None

    def _of_all_experts(
        self, name: str, parameter: str, experts: int, shape: tuple[int, int]
    ) -> Pair:
        stated = f"{self._stated[name].removesuffix('.base_layer')}.{parameter}"
        each = self._take(name, shape)
        whole, left = divmod(each.a.shape[0], experts)
        rank = self._checked_rank(name, whole, self._config.rank_of(stated) if not left else -1)
        a_ERI = each.a.reshape(experts, rank, -1)
        b_ORE = each.b.reshape(-1, rank, experts)
        return a_ERI.transpose(0, 2, 1), self._scaled(b_ORE.transpose(2, 1, 0), stated)

    def _take(self, name: str, needed: tuple[int, ...]) -> StoredFactors:
        each = self._factors[name]
        if needed != _shape(each):
            raise self._error(
                f"{name} of the model is {needed}, and its factors make {_shape(each)}",
                "use an adapter of this model",
            )
        self._used.add(name)
        return each

    def _checked_rank(self, name: str, rank: int, configured: int) -> int:
        if rank != configured:
            raise self._error(
                f"the factors of {name} have rank {rank}, and adapter_config.json gives"
                f" {configured}",
                "save the adapter again",
            )
        if rank > self._size.rank:
            raise self._error(
                f"rank {rank} of {name} exceeds the server's {self._size.rank}",
                "start it with a larger --adapter_rank",
            )
        return rank

    def _scaled(self, b: np.ndarray, stated: str) -> np.ndarray:
        return np.asarray(b, np.float32) * np.float32(self._config.scale_of(stated))

    def _error(self, what: str, remedy: str) -> InvalidRequestError:
        return InvalidRequestError(f"adapter {self._directory.name!r}: {what}; {remedy}")


def _shape(factors: StoredFactors) -> tuple[int, int]:
    return factors.b.shape[0], factors.a.shape[1]
