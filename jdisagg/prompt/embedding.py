"""How a model's hidden states become an embedding, as the files of sentence-transformers say."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jdisagg.errors import CheckpointError, InvalidRequestError
from jdisagg.prompt.logprobs import PromptLogprobs

LEAST_NORM = 1e-12
_MODULES = "modules.json"
_POOLINGS = {"lasttoken": "last", "mean_tokens": "mean"}
_NAMES = {"lasttoken": "last", "mean": "mean"}  # newer files have one name


@dataclass(frozen=True, slots=True)
class EmbeddingForm:
    """The embeddings of one model.

    Attributes:
        pooling: "last" or "mean" (`Request.pooling`).
        normalized: Whether vectors have the length 1.
        prompts: Texts to put before inputs, by name.
        default_prompt: Name of the prompt of inputs without a name, or "".
    """

    pooling: str
    normalized: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""

    @classmethod
    def from_directory(cls, directory: Path) -> "EmbeddingForm | None":
        """Returns None if the folder has no modules.json, and thus no embedding model. Raises
        CheckpointError if the embeddings have another form than is supported."""
        path = directory / _MODULES
        if not path.is_file():
            return None
        pooling, normalized = "last", False
        for module in _read(path):
            kind = str(module.get("type", "")).rpartition(".")[2]
            if kind == "Pooling":
                pooling = _pooling(directory / str(module.get("path", "")) / "config.json")
            elif kind == "Normalize":
                normalized = True
            elif kind != "Transformer":
                raise CheckpointError(
                    f"{path}: modules of the type {kind!r} are not supported; Transformer, Pooling"
                    " and Normalize are"
                )
        stated = directory / "config_sentence_transformers.json"
        own = _read(stated) if stated.is_file() else {}
        prompts = {name: text for name, text in (own.get("prompts") or {}).items() if text}
        return cls(pooling, normalized, prompts, own.get("default_prompt_name") or "")

    def prompt(self, name: str | None) -> str:
        """Raises InvalidRequestError if the model has no prompt of this name."""
        if name is None:
            name = self.default_prompt
        if name and name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none"
            raise InvalidRequestError(
                f"prompt_name={name[:80]!r} is not a prompt of the model; it has {known}"
            )
        return self.prompts.get(name, "")

    def vector(
        self, hidden: PromptLogprobs, prompt_tokens: int, dimensions: int | None
    ) -> np.ndarray:
        """Returns the embedding, float32 [D], of a prompt with the hidden state `hidden`.

        Args:
            dimensions: Number of leading values to return. They are normalized after the cut.

        Raises:
            InvalidRequestError: The model has fewer dimensions.
        """
        vector = np.frombuffer(hidden.hidden, np.float32)
        if self.pooling == "mean":
            vector = vector / np.float32(prompt_tokens)
        if dimensions is not None:
            if not 1 <= dimensions <= len(vector):
                raise InvalidRequestError(
                    f"dimensions must be in [1, {len(vector)}], got {dimensions}"
                )
            vector = vector[:dimensions]
        if self.normalized or dimensions is not None:
            vector = vector / np.float32(max(float(np.linalg.norm(vector)), LEAST_NORM))
        return vector


def _pooling(path: Path) -> str:
    fields = _read(path)
    if fields.get("include_prompt", True) is False:
        raise CheckpointError(f"{path}: include_prompt=false is not supported; use another model")
    named = fields.get("pooling_mode")
    if isinstance(named, str):
        modes, known = [named], _NAMES
    else:
        prefix = "pooling_mode_"
        modes = [
            name.removeprefix(prefix)
            for name, on in fields.items()
            if name.startswith(prefix) and on is True
        ]
        known = _POOLINGS
    if len(modes) != 1 or modes[0] not in known:
        raise CheckpointError(
            f"{path}: pooling by {' and '.join(modes) or 'nothing'} is not supported; one of"
            f" {', '.join(known)} is"
        )
    return known[modes[0]]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; fetch it again") from error
