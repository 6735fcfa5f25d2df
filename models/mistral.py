"""Reads the configuration of Mistral: Llama's form with one sliding window for all layers. The
window is 4096 if config.json omits it. If it is null, there is none."""

from models.decoder_config import DecoderConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, read_window, with_one_window

DEFAULTS = FamilyDefaults(kv_heads=8, context_tokens=4096 * 32)


def read_config(hf: HfConfig) -> DecoderConfig:
    return with_one_window(hf, read_decoder(hf, DEFAULTS), read_window(hf, 4096))
