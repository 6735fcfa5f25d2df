"""Records which hand-written kernels the ops may use.

Each kernel has a form in plain XLA with the same result, which replaces the kernel if it is
switched off."""

from collections.abc import Iterable

PAGED_ATTENTION = "paged_attention"
LATENT_ATTENTION = "latent_attention"
CUDNN_ATTENTION = "cudnn_attention"
WGMMA_EXPERTS = "wgmma_experts"
BLOCK_EXPERTS = "block_experts"
FILTERED_DRAW = "filtered_draw"
TPU_PREFILL = "tpu_prefill"
KERNELS_OF = {
    "gpu": (
        PAGED_ATTENTION,
        LATENT_ATTENTION,
        CUDNN_ATTENTION,
        WGMMA_EXPERTS,
        BLOCK_EXPERTS,
        FILTERED_DRAW,
    ),
    "tpu": (TPU_PREFILL,),
}
KERNELS = (*KERNELS_OF["gpu"], *KERNELS_OF["tpu"])

_off: set[str] = set()


def switch_off(names: Iterable[str]) -> None:
    _off.update(names)


def usable(name: str) -> bool:
    """The kernel must also support the platform and the sizes."""
    return name not in _off
