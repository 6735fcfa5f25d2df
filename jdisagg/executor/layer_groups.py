"""How a model's layers are cut into groups: the links of the prefill chain and the unit of a hand-off.

Both sides of a hand-off cut alike: groups are as even as can be, the larger ones first. Pure arithmetic.
"""


def layer_groups(layers: int, groups: int) -> tuple[range, ...]:
    """`groups` consecutive ranges (fewer where there are fewer layers) that cover all layers."""
    groups = min(groups, layers)
    size, larger = divmod(layers, groups)
    starts = [index * size + min(index, larger) for index in range(groups + 1)]
    return tuple(range(first, last) for first, last in zip(starts[:-1], starts[1:], strict=True))
