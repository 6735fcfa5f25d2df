"""Reads the folder of an EAGLE-3 head in its published form: config.json of a Llama model with one
layer, and safetensors files with `fc`, `midlayer`, `norm`, `lm_head` and `d2t`."""

from dataclasses import replace

import numpy as np

from jdisagg.errors import CheckpointError
from models.decoder_config import DecoderConfig
from models.drafter_config import EagleConfig
from models.hf_config import HfConfig
from models.llama import read_config
from models.safetensors_files import SafetensorsFiles

MAP = "d2t"  # for each draft token the difference between the model's token and its own number
_UNUSED = ("t2d", "embed_tokens.weight")  # the inverse of the map, and a copy of the embedding


def read_eagle_head(
    hf: HfConfig, config: DecoderConfig, files: SafetensorsFiles
) -> tuple[DecoderConfig, SafetensorsFiles, dict[str, np.ndarray]]:
    """Returns a model's configuration with that of an EAGLE-3 head, the head's tensors, and those
    of them whose values are computed. Raises CheckpointError if the folder has no head in this
    form, or a head of another model."""
    own = read_config(hf)
    found = files.renamed((("model.", ""), ("layers.0.", "midlayer."))).without(_UNUSED)
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
                f"EAGLE head {hf.where}: {rule}; give the head that was trained for this model"
            )
    kinds = {
        "has recurrent state": any(layer.recurrent for layer in config.layers),
        "reads images": config.vision is not None,
    }
    for kind, applies in kinds.items():
        if applies:
            raise CheckpointError(
                f"EAGLE head {hf.where}: the model {kind}, and such models have no heads here;"
                " remove --draft"
            )
    eagle = EagleConfig(
        replace(own, tied=False, kv_dtype=config.kv_dtype),
        taps,
        drafts,
        hf.flag("norm_before_residual", False),
        MAP in found.shapes(),
    )
    targets = {}
    if eagle.mapped:
        offsets = found.raw(MAP)
        targets[MAP] = (offsets + np.arange(len(offsets))).astype(np.float32)
    return replace(config, eagle=eagle), found, targets


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
