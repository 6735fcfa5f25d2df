"""Reads the folder of a separate drafter (`--draft`): an EAGLE-3 head, or a Gemma 4 assistant."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from models.decoder_config import DecoderConfig
from models.eagle_checkpoint import read_eagle_head
from models.gemma4_assistant_checkpoint import ASSISTANTS, read_assistant
from models.hf_config import HfConfig
from models.hf_weights import PREFIX
from models.safetensors_files import CheckpointTensors, SafetensorsFiles


def with_drafter(
    folder: str, config: DecoderConfig, files: CheckpointTensors
) -> tuple[DecoderConfig, CheckpointTensors]:
    """Returns a model's configuration and tensors with those of the drafter in `folder`. Raises
    CheckpointError if the folder has no drafter in a known form, or one of another model."""
    directory = Path(folder)
    hf = HfConfig.from_directory(directory)
    read = read_assistant if hf.raw("model_type") in ASSISTANTS else read_eagle_head
    config, tensors, computed = read(hf, config, SafetensorsFiles.from_directory(directory))
    return config, _TwoFolders(files, tensors, computed)


class _TwoFolders:
    """The tensors of a model, and those of a drafter under names that begin with `PREFIX`.
    `computed` replaces tensors of the drafter."""

    def __init__(
        self,
        files: CheckpointTensors,
        drafter: SafetensorsFiles,
        computed: Mapping[str, np.ndarray],
    ) -> None:
        self._files, self._drafter, self._computed = files, drafter, computed

    def shapes(self) -> dict[str, tuple[int, ...]]:
        own = {PREFIX + name: shape for name, shape in self._drafter.shapes().items()}
        return {**self._files.shapes(), **own}

    def kinds(self, *, but: tuple[str, ...] = ()) -> set[str]:
        return self._files.kinds(but=but)

    def unreadable(self) -> list[str]:
        return self._files.unreadable()

    @property
    def total_bytes(self) -> int:
        return self._files.total_bytes + self._drafter.total_bytes

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        if not name.startswith(PREFIX):
            return self._files.read(name, index)
        name = name.removeprefix(PREFIX)
        made = self._computed.get(name)
        return self._drafter.read(name, index) if made is None else made[index]
