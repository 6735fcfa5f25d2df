"""Reads a Hugging Face config.json: typed fields with the defaults of their family.

A family's reader requests the fields that it supports. At the end `refuse_unread` checks the
remaining fields against the lists of `models/hf_fields.py`, so that no field that may change the
output is ignored."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jdisagg.errors import CheckpointError
from models.hf_fields import CHANGING, VISION, harmless, says_nothing, short
from models.model_folder import check_model_folder


@dataclass(frozen=True, slots=True)
class FamilyDefaults:
    """Values that transformers assumes for fields missing in config.json. `partial_rotary` is the
    fraction of a head that has rotary positions. None means the whole head, even if config.json
    states a fraction.
    """

    kv_heads: int | None
    context_tokens: int
    norm_epsilon: float = 1e-6
    rope_theta: float = 10000.0
    tied: bool = False
    partial_rotary: float | None = None


@dataclass(frozen=True, slots=True)
class Outer:
    """A multimodal model whose text part is served.

    Attributes:
        tied: Default of `tie_word_embeddings`.
        own_head: Whether `tie_word_embeddings` is read from the text part instead of the top level.
        within: Field that holds the model with the text part, if it is one of several models.
    """

    architecture: str
    text: str
    tied: bool
    own_head: bool = False
    within: str = ""


OUTER = {
    "internvl": Outer("InternVLForConditionalGeneration", "qwen2", tied=True),
    "qwen2_vl": Outer("Qwen2VLForConditionalGeneration", "qwen2_vl_text", tied=False),
    "qwen2_5_vl": Outer("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", tied=False),
    "voxtral": Outer("VoxtralForConditionalGeneration", "llama", tied=True),
    "glm4v": Outer("Glm4vForConditionalGeneration", "glm4v_text", tied=False),
    "glm46v": Outer("Glm46VForConditionalGeneration", "glm4v_text", tied=False),
    "glm4v_moe": Outer("Glm4vMoeForConditionalGeneration", "glm4v_moe_text", tied=False),
    "exaone4_5": Outer("Exaone4_5_ForConditionalGeneration", "exaone4", tied=False),
    "gemma4_unified": Outer(
        "Gemma4UnifiedForConditionalGeneration", "gemma4_unified_text", tied=True
    ),
    "gemma3": Outer("Gemma3ForConditionalGeneration", "gemma3_text", tied=True),
    "gemma4": Outer("Gemma4ForConditionalGeneration", "gemma4_text", tied=True),
    "llama4": Outer("Llama4ForConditionalGeneration", "llama4_text", tied=False, own_head=True),
    "kimi_k25": Outer("KimiK25ForConditionalGeneration", "deepseek_v3", tied=True),
    "minimax_m3_vl": Outer(
        "MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl_text", tied=False
    ),
    "step3p7": Outer("Step3p7ForConditionalGeneration", "step3p5", tied=False),
    "mistral3": Outer("Mistral3ForConditionalGeneration", "mistral", tied=True),
    "qwen3_vl": Outer("Qwen3VLForConditionalGeneration", "qwen3_vl_text", tied=False),
    "qwen3_vl_moe": Outer("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text", tied=False),
    "qwen3_omni_moe": Outer(
        "Qwen3OmniMoeForConditionalGeneration",
        "qwen3_omni_moe_text",
        tied=False,
        within="thinker_config",
    ),
    "qwen3_omni_moe_thinker": Outer(
        "Qwen3OmniMoeThinkerForConditionalGeneration", "qwen3_omni_moe_text", tied=False
    ),
    "qwen3_5": Outer("Qwen3_5ForConditionalGeneration", "qwen3_5_text", tied=False),
    "qwen3_5_moe": Outer("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", tied=False),
}

# Text parts of a published model that are another family under a name of their own.
SAME = {"exaone4_5_text": "exaone4"}


class HfConfig:
    """The fields of one config.json. Each accessor checks the type, names the field in errors, and
    records that the field was read."""

    def __init__(
        self, fields: Mapping[str, object], where: str = "config.json", *, sizes_only: bool = False
    ) -> None:
        """With `sizes_only`, unsupported options are ignored, which suffices for cost estimates.
        The attribute `nested` is True if the fields are the text part of a multimodal model, and
        `whole` holds the fields of the whole model."""
        self.whole: Mapping[str, object] = fields
        outer = OUTER.get(str(fields.get("model_type")))
        part = fields.get(outer.within) if outer is not None else None
        if isinstance(part, dict):
            kept = ("architectures", "model_type", "quantization_config")
            fields = part | {name: fields[name] for name in kept if name in fields}
        inner = fields.get("text_config")
        if outer is not None and inner is None and "hidden_size" in fields:
            inner = {}  # Qwen2.5-VL publishes the fields of its text part at the top level
        self.nested = outer is not None and isinstance(inner, dict)
        if outer is not None and isinstance(inner, dict):
            fields = _text_part(fields, inner, outer, where)
        self.fields: dict[str, object] = dict(fields)  # null ones included
        self._read: set[str] = set()
        self.where = where
        self.sizes_only = sizes_only

    @classmethod
    def from_directory(cls, directory: Path, *, sizes_only: bool = False) -> "HfConfig":
        check_model_folder(directory)
        path, beside = directory / "config.json", directory / "hf_quant_config.json"
        if not path.is_file():
            raise CheckpointError(
                f"model directory {str(directory)!r} has no config.json; give a Hugging Face or"
                " converted directory"
            )
        fields = _read_fields(path)
        if fields.get("quantization_config") is None and beside.is_file():
            # ModelOpt's own file, which older exports have in place of the field
            fields["quantization_config"] = {"quant_method": "modelopt"} | _read_fields(beside)
        return cls(fields, str(path), sizes_only=sizes_only)

    @classmethod
    def from_file(cls, path: Path, *, sizes_only: bool = False) -> "HfConfig":
        return cls(_read_fields(path), str(path), sizes_only=sizes_only)

    def error(self, field: str, rule: str, remedy: str) -> CheckpointError:
        return CheckpointError(
            f"{self.where}: {field} {rule}, got {short(self.fields.get(field))}; {remedy}"
        )

    def has(self, field: str) -> bool:
        return self.raw(field) is not None

    def raw(self, field: str) -> object:
        self._read.add(field)
        return self.fields.get(field)

    def count(self, field: str, default: int | None = None, *, least: int = 1) -> int:
        """Without a default the field is required. null means that the field is absent."""
        value = self.raw(field)
        if value is None:
            if default is None:
                raise CheckpointError(
                    f"{self.where}: needed field {field!r} is missing; take it from the model's"
                    " published config.json"
                )
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(field, f"must be an integer of at least {least}", "correct it")
        return value

    def number(self, field: str, default: float) -> float:
        return checked_number(self.raw(field), default, field, self.where)

    def flag(self, field: str, default: bool) -> bool:
        value = self.raw(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(field, "must be true or false", "correct it")
        return value

    def counts(self, field: str) -> tuple[int, ...]:
        value = self.raw(field)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(
            isinstance(item, int) and not isinstance(item, bool) for item in value
        ):
            raise self.error(field, "must be a list of integers", "correct it")
        return tuple(value)

    def names(self, field: str) -> tuple[str, ...] | None:
        value = self.raw(field)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(field, "must be a list of strings", "correct it")
        return tuple(value)

    def changed(self, **fields: object) -> "HfConfig":
        """Returns a copy in which some fields have other values. The copy and the original share
        one record of the fields that were read."""
        other = HfConfig(self.fields | fields, self.where, sizes_only=self.sizes_only)
        other._read, other.nested, other.whole = self._read, self.nested, self.whole
        return other

    def renamed(self, usual: Mapping[str, str]) -> "HfConfig":
        """Returns a copy in which fields of other names (keys) have their usual names (values).
        Raises CheckpointError if a field is stated under several names with different values."""
        fields: dict[str, object] = {}
        for own, name in usual.items():
            value = self.raw(own)
            if value is None:
                continue
            stated = fields.get(name, self.raw(name))
            if stated not in (None, value):
                raise self.error(own, f"must equal {name}={short(stated)}", "remove one")
            fields[name] = value
        return self.changed(**fields)

    def require(self, only: Mapping[str, object]) -> None:
        """Raises CheckpointError if a field has another value than its single supported one."""
        for field, value in only.items():
            if self.raw(field) not in (None, value) and not self.sizes_only:
                said = json.dumps(value) if isinstance(value, bool) else repr(value)
                raise self.error(field, f"must be {said}", "another form of it is not supported")

    def beside(self, name: str) -> Mapping[str, object]:
        path = Path(self.where).parent / name
        return _read_fields(path) if path.is_file() else {}

    def pass_over(self, *fields: str) -> None:
        """Marks fields as read because they do not change the output of this model family."""
        self._read.update(fields)

    def unread(self, *, known_only: bool = False) -> list[str]:
        found = []
        for field, value in self.fields.items():
            if field in self._read or harmless(field) or says_nothing(field, value):
                continue
            if known_only and field not in CHANGING:
                continue
            if field == "sliding_window" and self.fields.get("use_sliding_window") is False:
                continue  # switched off
            meaning = CHANGING.get(field, "not known")
            found.append(f"{field}={short(value)} ({meaning})")
        return found

    def refuse_unread(self) -> None:
        """Raises CheckpointError if fields that may change the output were not read."""
        if (found := self.unread()) and not self.sizes_only:
            raise CheckpointError(
                f"{self.where}: not supported for {self.fields.get('model_type')}:"
                f" {', '.join(found)}; use a checkpoint without them, or remove fields that do not"
                " change the output"
            )


def _read_fields(path: Path) -> dict[str, object]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(fields, dict):
        raise CheckpointError(
            f"{path} must hold a JSON object, got {type(fields).__name__}; fetch it again"
        )
    return fields


def _text_part(
    fields: Mapping[str, object], inner: Mapping[str, object], outer: Outer, where: str
) -> dict[str, object]:
    architectures = fields.get("architectures")
    # Published as KimiK25..., written by transformers as Kimi_K25...
    stated = architectures if isinstance(architectures, list) else [outer.architecture]
    called = {str(each).replace("_", "") for each in stated}
    if outer.architecture.replace("_", "") not in called:
        raise CheckpointError(
            f"{where}: architectures must hold {outer.architecture!r}, got {short(architectures)};"
            " only models that generate text are served"
        )
    of_whole = {name: value for name, value in fields.items() if name not in VISION}
    stating = inner if outer.own_head else fields
    tied = {"tie_word_embeddings": stating.get("tie_word_embeddings", outer.tied)}
    kind = {"model_type": SAME.get(str(inner.get("model_type")), inner.get("model_type"))}
    kind["model_type"] = kind["model_type"] or outer.text
    known = {name: value for name, value in inner.items() if name != "architectures"}
    return of_whole | known | tied | kind


def checked_number(value: object, default: float | None, name: str, where: str) -> float:
    """Without a default the value is required."""
    if value is None:
        if default is None:
            raise CheckpointError(
                f"{where}: needed field {name!r} is missing; take it from the model's published"
                " config.json"
            )
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise CheckpointError(
            f"{where}: {name} must be a finite number, got {short(value)}; correct it"
        )
    return float(value)
