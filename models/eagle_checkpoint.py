"""Reads the folder of an EAGLE-3 head in its published form: config.json of a Llama model with one
layer, and safetensors files with `fc`, `midlayer`, `norm`, `lm_head` and `d2t`."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from jdisagg.errors import CheckpointError
from models.decoder_config import DecoderConfig, EagleConfig
from models.hf_config import HfConfig
from models.hf_weights import PREFIX
from models.llama import read_config
from models.safetensors_files import CheckpointTensors, SafetensorsFiles

MAP = "d2t"  # for each draft token the difference between the model's token and its own number
_UNUSED = ("t2d", "embed_tokens.weight")  # the inverse of the map, and a copy of the embedding


def with_eagle_head(
    folder: str, config: DecoderConfig, files: CheckpointTensors
) -> tuple[DecoderConfig, CheckpointTensors]:
    """Returns a model's configuration and tensors with those of an EAGLE-3 head. Raises
    CheckpointError if the folder has no head in this form, or a head of another model."""
    directory = Path(folder)
    hf = HfConfig.from_directory(directory)
    own = read_config(hf)
    found = SafetensorsFiles.from_directory(directory).renamed(
        (("model.", ""), ("layers.0.", "midlayer."))
    )
    drafts = hf.count("draft_vocab_size", own.vocabulary)
    taps = _taps(hf, len(config.layers))
    rules = {
        f"num_hidden_layers must be 1, got {len(own.layers)}": len(own.layers) == 1,
        f"hidden_size must be the model's {config.width}, got {own.width}": (
            own.width == config.width
        ),
        f"vocab_size must be the model's {config.vocabulary}, got {own.vocabulary}": (
            own.vocabulary == config.vocabulary
        ),
        f"num_key_value_heads must be the model's {config.kv_heads}, got {own.kv_heads}": (
            own.kv_heads == config.kv_heads
        ),
        f"draft_vocab_size={drafts} is below vocab_size, and there is no tensor {MAP}": (
            drafts == own.vocabulary or MAP in found.shapes()
        ),
    }
    for rule, holds in rules.items():
        if not holds:
            raise CheckpointError(
                f"EAGLE head {folder}: {rule}; give the head that was trained for this model"
            )
    kinds = {
        "has recurrent state": any(layer.recurrent for layer in config.layers),
        "reads images": config.vision is not None,
    }
    for kind, applies in kinds.items():
        if applies:
            raise CheckpointError(
                f"EAGLE head {folder}: the model {kind}, and such models have no heads here; remove"
                " --draft"
            )
    eagle = EagleConfig(
        replace(own, tied=False, kv_dtype=config.kv_dtype),
        taps,
        drafts,
        hf.flag("norm_before_residual", False),
        MAP in found.shapes(),
    )
    return replace(config, eagle=eagle), _TwoFolders(files, found)


def _taps(hf: HfConfig, layers: int) -> tuple[int, ...]:
    given = hf.raw("eagle_config")
    listed = given.get("eagle_aux_hidden_state_layer_ids") if isinstance(given, dict) else None
    if listed is None:
        return tuple(sorted(max(0, min(at, layers - 1)) for at in (2, layers // 2, layers - 3)))
    valid = isinstance(listed, list) and all(type(layer) is int for layer in listed)
    if not valid or listed != sorted(listed) or not listed or not 0 <= listed[0] <= listed[-1]:
        raise hf.error(
            "eagle_config", "must list layers in ascending order", "correct the config.json"
        )
    if listed[-1] >= layers:
        raise hf.error("eagle_config", f"must list layers below {layers}", "give the model's head")
    return tuple(listed)


class _TwoFolders:
    def __init__(self, files: CheckpointTensors, head: SafetensorsFiles) -> None:
        self._files, self._head = files, head

    def shapes(self) -> dict[str, tuple[int, ...]]:
        own = {
            PREFIX + name: shape
            for name, shape in self._head.shapes().items()
            if name not in _UNUSED
        }
        return {**self._files.shapes(), **own}

    def kinds(self, *, but: tuple[str, ...] = ()) -> set[str]:
        return self._files.kinds(but=but)

    def unreadable(self) -> list[str]:
        return self._files.unreadable()

    @property
    def total_bytes(self) -> int:
        return self._files.total_bytes + self._head.total_bytes

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        if not name.startswith(PREFIX):
            return self._files.read(name, index)
        name = name.removeprefix(PREFIX)
        if name == MAP:
            offsets = self._head.raw(MAP)
            return (offsets + np.arange(len(offsets))).astype(np.float32)[index]
        return self._head.read(name, index)
