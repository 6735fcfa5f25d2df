"""Counts the (query, key) pairs of attention, averaged over layers with and without a sliding
window."""

from jdisagg.costs.model_geometry import CostGeometry, LatentAttention


def windowed_share(geometry: CostGeometry) -> tuple[int, float]:
    """Returns the size of the sliding window in tokens, and the fraction of the attention work for
    one (query, key) pair that is in layers with this window. Returns (0, 0.0) without a window."""
    attention = geometry.attention
    if isinstance(attention, LatentAttention) or attention.window is None:
        return 0, 0.0
    mean_head = geometry.head_sizes / max(1, geometry.attention_layers)
    share = attention.windowed_layers * attention.mean_size / mean_head
    return attention.window, share / geometry.attention_layers


def attended_pairs(geometry: CostGeometry, new: int, cached: int = 0) -> float:
    """Returns the number of (query, key) pairs of attention when `new` tokens are computed after
    `cached` tokens. With a sliding window, it is a mean over layers with and without the window."""
    whole = new * cached + new * (new + 1) / 2
    window, share = windowed_share(geometry)
    if not window:
        return whole
    growing = max(0, min(new, window - cached))  # tokens that attend to all earlier tokens
    seen = growing * cached + growing * (growing + 1) / 2 + (new - growing) * window
    # Weighted by the work of each kind of layer for one pair.
    return whole * (1 - share) + seen * share
