"""The two ways in which researchers write a layout; both give the one `Layout` that everything else
takes. Pure: knows no JAX."""

from jdisagg.errors import LayoutError
from jdisagg.layout.axes import Layout


def PrefillLayout(tp: int = 1, ep: int = 1, dp: int = 1) -> Layout:
    """Prefill wants big matrices: `PrefillLayout(tp=4, ep=4)` splits heads over four devices and
    spreads experts over the same four."""
    return Layout(dp=dp, tp=tp, ep=ep)


def DecoderLayout(dp: int = 1, ep: int = 1, tp: int | None = None) -> Layout:
    """Decode wants many sequences: `DecoderLayout(dp=4, ep=16)` has four groups of four devices,
    experts spread over all sixteen.

    `tp` follows from ep / dp where it is not given, and is 1 where ep = 1."""
    if tp is None:
        Layout(dp=dp)  # refuses what is no positive integer
        if not isinstance(ep, int) or ep < 1 or (ep > 1 and ep % dp):
            raise LayoutError(
                f"decoder layout: tp = ep / dp = {ep!r} / {dp} is not a positive integer; choose ep"
                " a multiple of dp, or give tp"
            )
        tp = max(1, ep // dp)
    return Layout(dp=dp, tp=tp, ep=ep)
