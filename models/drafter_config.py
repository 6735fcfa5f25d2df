"""Configurations of separate drafters (`--draft`)."""

from dataclasses import dataclass

from models.decoder_config import DecoderConfig


@dataclass(frozen=True)
class EagleConfig:
    """Configuration of an EAGLE-3 head (`eagle_head.py`).

    Attributes:
        taps: Layers of the model before which its activations are the head's input, ascending.
        residual_after_norm: Whether the residual stream is the hidden state after its norm.
        mapped: Whether draft tokens are numbered separately from the model's tokens (`d2t`).
    """

    config: DecoderConfig
    taps: tuple[int, ...]
    vocabulary: int
    residual_after_norm: bool = False
    mapped: bool = True


@dataclass(frozen=True)
class AssistantConfig:
    """Configuration of a Gemma 4 assistant (`gemma4_assistant.py`).

    Attributes:
        config: Its text model. The sources of its layers are layers of the model for which it
            drafts.
        centroids, chosen: Number of clusters of the vocabulary, and number of those from which a
            token is drafted. 0 means that the vocabulary has no clusters.
    """

    config: DecoderConfig
    centroids: int = 0
    chosen: int = 0

    @property
    def reads(self) -> tuple[int, ...]:
        """For each layer, the layer of the model whose keys and values it reads."""
        return tuple(layer.source for layer in self.config.layers if layer.source is not None)
