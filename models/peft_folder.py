"""A LoRA adapter's folder in the format of the PEFT library: adapter_config.json and
adapter_model.safetensors.

The change of a matrix W [out, in] is s B A, with A [r, in] and B [out, r] in the file, and s =
alpha / r, or alpha / sqrt(r) with `use_rslora`. Does not import JAX."""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jdisagg.errors import CheckpointError, InvalidRequestError
from models.safetensors_files import SafetensorsFiles

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])(\.default)?\.weight")
_BLOCK_BYTES = 1 << 20
# Fields that have no effect on an adapter's computation, or that are redundant with the tensor
# names in the file.
_IGNORED = frozenset(
    (
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "lora_dropout",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "peft_version",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "runtime_config",
        "qalora_group_size",
        "megatron_core",
        "megatron_config",
        "arrow_config",
        "kasa_config",
        "velora_config",
        "ensure_weight_tying",
        "monteclora_config",
    )  # fmt: skip
)
_READ = frozenset(
    (
        "peft_type",
        "task_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "rank_pattern",
        "alpha_pattern",
        "bias",
        "fan_in_fan_out",
        "init_lora_weights",
        "target_parameters",
    )  # fmt: skip
)
_REFUSED = {
    "use_dora": "a DoRA adapter scales the columns of the merged matrix; train it without use_dora",
    "modules_to_save": "it replaces whole modules of the model; merge the adapter into the model",
    "layer_replication": "it changes the number of layers; merge the adapter into the model",
    "lora_bias": "it adds a bias to B; train it without lora_bias",
    "trainable_token_indices": "it changes embeddings; merge the adapter into the model",
    "alora_invocation_tokens": "an activated LoRA applies to a part of a prompt; train a plain one",
    "use_qalora": "QALoRA pools the inputs of A; train it without use_qalora",
    "use_bdlora": "its factors are block-diagonal; train it without use_bdlora",
}
# Initialisations that also change the base model's matrices.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    rank: int
    alpha: float
    by_root: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        return _by_pattern(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        alpha = _by_pattern(self.alphas, module, self.alpha)
        return alpha / math.sqrt(rank) if self.by_root else alpha / rank


@dataclass(frozen=True, slots=True)
class StoredFactors:
    """The LoRA factors of one module with rank r: A [r, in] and B [out, r]. Joint factors of E
    experts are A [E r, in], ordered by expert and then by rank, and B [out, r E], ordered by rank
    and then by expert."""

    a: np.ndarray
    b: np.ndarray


def adapter_digest(directory: str | Path) -> str:
    """Returns a hash of the adapter's content, 64 hexadecimal digits. Raises InvalidRequestError
    for a folder without the files of an adapter."""
    digest = hashlib.sha256()
    for name in (CONFIG, WEIGHTS):
        path = Path(directory) / name
        try:
            size = path.stat().st_size
            digest.update(f"{name} {size}\n".encode())
            with path.open("rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    digest.update(block)
        except OSError as error:
            raise _error(
                directory, f"{name} cannot be read ({error.strerror})", "give a folder of PEFT"
            ) from error
    return digest.hexdigest()


def check_adapter(directory: str) -> str:
    """Checks that an adapter's folder is complete and its configuration is supported, without
    comparing it with the model. Returns the adapter's digest. Raises InvalidRequestError if the
    adapter cannot be served."""
    read_peft_config(directory)
    read_factors(directory)
    return adapter_digest(directory)


def read_peft_config(directory: str | Path) -> PeftConfig:
    """Raises InvalidRequestError, which names the field, for an adapter that cannot be served."""
    fields = _fields(directory)
    for name, why in _REFUSED.items():
        if fields.get(name):
            raise _error(directory, f"{name}={fields[name]!r} is not supported", why)
    for name in fields.keys() - _IGNORED - _READ - _REFUSED.keys():
        if fields[name]:
            raise _error(
                directory,
                f"{name}={fields[name]!r} is not a supported field",
                "remove it, or train the adapter without it",
            )
    _equals(directory, fields, "peft_type", "LORA", None)
    _equals(directory, fields, "task_type", "CAUSAL_LM", None)
    _equals(directory, fields, "bias", "none", None)
    _equals(directory, fields, "fan_in_fan_out", False, None)
    start = fields.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise _error(
            directory,
            f"init_lora_weights={start!r} changes the base model's matrices",
            "convert the adapter with PEFT's path_initial_model_for_weight_conversion",
        )
    return PeftConfig(
        int(_number(directory, "r", fields.get("r", 8))),
        _number(directory, "lora_alpha", fields.get("lora_alpha", 8)),
        bool(fields.get("use_rslora", False)),
        {
            key: int(_number(directory, f"rank_pattern[{key!r}]", value))
            for key, value in _mapping(directory, fields, "rank_pattern").items()
        },
        {
            key: _number(directory, f"alpha_pattern[{key!r}]", value)
            for key, value in _mapping(directory, fields, "alpha_pattern").items()
        },
    )


def read_factors(directory: str | Path) -> dict[str, StoredFactors]:
    """Returns the factors of each adapted module by the module's name in the base model. The arrays
    are views of the file. Raises InvalidRequestError if the file cannot be read or has unsupported
    tensors."""
    try:
        files = SafetensorsFiles.of_file(Path(directory) / WEIGHTS)
    except (CheckpointError, OSError) as error:
        raise _error(directory, str(error), "save the adapter again") from error
    halves: dict[str, dict[str, np.ndarray]] = {}
    for name in files.shapes():
        found = _FACTOR.fullmatch(name)
        if found is None:
            raise _error(
                directory,
                f"tensor {name!r} is not a factor lora_A or lora_B of a matrix",
                "train the adapter on linear layers only",
            )
        module = found["module"].removeprefix(_PREFIX)
        try:
            halves.setdefault(module, {})[found["factor"]] = files.read(name, (slice(None),))
        except CheckpointError as error:
            raise _error(directory, str(error), "save the adapter in bfloat16") from error
    return dict(_paired(directory, halves))


def _paired(
    directory: str | Path, halves: Mapping[str, Mapping[str, np.ndarray]]
) -> Iterator[tuple[str, StoredFactors]]:
    if not halves:
        raise _error(directory, f"{WEIGHTS} holds no factors", "save the adapter again")
    for module, pair in halves.items():
        a, b = pair.get("A"), pair.get("B")
        if a is None or b is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            shapes = {key: value.shape for key, value in pair.items()}
            raise _error(
                directory,
                f"module {module!r} needs lora_A [r, in] and lora_B [out, r], got {shapes}",
                "save the adapter again",
            )
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            # One product covers all slots (`ops/adapters.py`), where 0 times NaN is NaN.
            raise _error(
                directory,
                f"module {module!r} has factors that are not finite",
                "train it again, since they would spoil the answers of other adapters",
            )
        yield module, StoredFactors(a, b)


def _by_pattern(values: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    for key, value in values.items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return otherwise


def _fields(directory: str | Path) -> dict[str, Any]:
    try:
        fields = json.loads((Path(directory) / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _error(
            directory, f"{CONFIG} cannot be read ({error})", "give a folder of PEFT"
        ) from error
    if not isinstance(fields, dict):
        raise _error(directory, f"{CONFIG} is not a JSON object", "save the adapter again")
    return fields


def _equals(directory: str | Path, fields: Mapping[str, Any], name: str, *allowed: object) -> None:
    if (value := fields.get(name)) not in allowed:
        raise _error(
            directory, f"{name} must be {allowed[0]!r}, got {value!r}", "train a plain LoRA adapter"
        )


def _number(directory: str | Path, name: str, value: object) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not 0 < value < 1 << 20:  # type: ignore[operator]
        raise _error(directory, f"{name} must be a positive number, got {value!r}", "correct it")
    return float(value)  # type: ignore[arg-type]


def _mapping(directory: str | Path, fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = fields.get(name) or {}
    if not isinstance(value, dict):
        raise _error(directory, f"{name} must be an object, got {value!r}", "correct it")
    for key in value:
        try:
            re.compile(rf"(.*\.)?({key})$")
        except re.error as error:
            raise _error(
                directory, f"{name}: {key!r} is no regular expression ({error})", "correct it"
            ) from error
    return value


def _error(directory: str | Path, what: str, remedy: str) -> InvalidRequestError:
    return InvalidRequestError(f"adapter {Path(directory).name!r}: {what}; {remedy}")
