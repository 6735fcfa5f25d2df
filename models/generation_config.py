"""Reads generation_config.json, which has end-of-text tokens, and defaults for sampling parameters
that a request does not set. vLLM and SGLang use the file in the same way.

This module must not import JAX, because router processes use it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from jdisagg.errors import CheckpointError, InvalidRequestError
from jdisagg.request import SamplingDefaults, SamplingParams

LEAST_TOP_P = 1e-6
_RENAMED = {"max_tokens": "max_new_tokens"}


def read_sampling_defaults(directory: Path) -> SamplingDefaults:
    """Raises CheckpointError for a value out of range."""
    path = directory / "generation_config.json"
    fields = read_object(path)
    given: dict[str, Any] = {
        one.name: fields[name]
        for one in dataclasses.fields(SamplingDefaults)
        if fields.get(name := _RENAMED.get(one.name, one.name)) is not None
    }
    for name in ("max_tokens", "top_k"):
        if isinstance(value := given.get(name), float) and value.is_integer():
            given[name] = int(value)
    if given.get("top_k") == -1:  # all tokens, as in vLLM
        given["top_k"] = 0
    if given.get("top_p") == 0:  # nothing but the most likely token
        given["top_p"] = LEAST_TOP_P
    try:
        SamplingParams(**given)
        for name in ("max_tokens", "top_k"):
            if not isinstance(given.get(name, 0), int):
                raise InvalidRequestError(f"{name} must be an integer, got {given[name]!r}")
    except InvalidRequestError as error:
        raise CheckpointError(f"{path}: {error.message}; correct it or remove it") from error
    return SamplingDefaults(**given)


def stated_eos_ids(path: Path) -> list[int]:
    fields = read_object(path)
    value = fields.get("eos_token_id")
    if value is None and isinstance(inner := fields.get("text_config"), dict):
        value = inner.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    found = [
        item
        for item in ids
        if isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**31
    ]
    if len(found) < len(ids):
        raise CheckpointError(
            f"{path}: eos_token_id must be a token id or a list of them, got {value!r:.80};"
            " correct it"
        )
    return found


def read_object(path: Path) -> dict[str, object]:
    """Reads a JSON object from a file. Returns an empty object if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(fields, dict):
        raise CheckpointError(
            f"{path} must hold a JSON object, got {type(fields).__name__}; fetch it again"
        )
    return fields
