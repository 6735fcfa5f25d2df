"""OLMo 2: norms after attention and feed-forward, one norm over all heads of q and another over all
heads of k."""

from dataclasses import replace

from models.decoder_config import DecoderConfig
from models.hf_config import FamilyDefaults, HfConfig
from models.hf_decoder import read_decoder, refuse_windows

DEFAULTS = FamilyDefaults(kv_heads=None, context_tokens=2048, norm_epsilon=1e-5)


def read_config(hf: HfConfig, defaults: FamilyDefaults = DEFAULTS) -> DecoderConfig:
    refuse_windows(hf, "this family uses full attention")
    bias = hf.flag("attention_bias", False)
    config = read_decoder(hf, defaults, qkv_bias=bias, output_bias=bias, qk_norm="all")
    return replace(config, norms="after")
