"""Checks that a configuration is supported with pipeline stages. Has no side effects."""

from jdisagg.config import FROM_FOLDER, InstanceConfig
from jdisagg.errors import ConfigError


def check_stages(
    instance: InstanceConfig, *, state: bool, windows_apart: bool, drafts: bool, reads_tokens: bool
) -> None:
    """Checks that an instance supports the pipeline stages of its layout.

    Raises:
        ConfigError: The combination is not supported. The message has the reason and a remedy.
    """
    if instance.layout.pp == 1:
        return
    reasons = {
        "the model keeps recurrent state, and one block has the state of all layers; use pp=1": (
            state
        ),
        "the model sends the KV of layers with a sliding window apart from that of the other"
        " layers, in blocks of layers of several stages; use pp=1, or mode=chunked": windows_apart,
        "each layer reads the tokens' embeddings, which are on the first stage; use pp=1": (
            reads_tokens
        ),
        "the layer that drafts tokens needs the embedding, which is on the first stage, behind the"
        " last stage; set speculate to ngram or off": (
            drafts and instance.speculate in ("mtp", *FROM_FOLDER)
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigError(f"layout {instance.layout}: {reason}")
