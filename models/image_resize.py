"""Resizes images as transformers does: bicubic or bilinear with antialiasing, on uint8 pixels, by
integer arithmetic. The results equal those of torchvision bit by bit.

The image is resized along its width and then along its height, with uint8 pixels between the two.
Each output pixel is a sum of input pixels with 16-bit weights. This module must not import JAX,
because router processes use it."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

BILINEAR, BICUBIC = 2, 3  # Pillow's numbers, which config files use
_A = -0.5
_MOST_WEIGHT_BITS = 22
_BLOCK_VALUES = 1 << 18  # small enough for the processor's cache


def resized(pixels_HWC: np.ndarray, height: int, width: int, filter: int) -> np.ndarray:
    if pixels_HWC.shape[1] != width:
        turned_WHC = np.ascontiguousarray(pixels_HWC.transpose(1, 0, 2))
        pixels_HWC = _along_rows(turned_WHC, width, filter).transpose(1, 0, 2)
    if pixels_HWC.shape[0] != height:
        pixels_HWC = _along_rows(np.ascontiguousarray(pixels_HWC), height, filter)
    return np.ascontiguousarray(pixels_HWC)


class _Weights(NamedTuple):
    first_T: np.ndarray
    weights_TK: np.ndarray
    bits: int


def _along_rows(rows_SAC: np.ndarray, size: int, filter: int) -> np.ndarray:
    count, *inner = rows_SAC.shape
    rows_SV = rows_SAC.reshape(count, -1)
    first_T, weights_TK, bits = _weights(count, size, filter)
    made_TV = np.empty((size, rows_SV.shape[1]), np.uint8)
    step = max(1, _BLOCK_VALUES // max(1, rows_SV.shape[1]))
    for begin in range(0, size, step):
        block = slice(begin, begin + step)
        sum_TV = np.full((len(first_T[block]), rows_SV.shape[1]), 1 << (bits - 1), np.int32)
        for k in range(weights_TK.shape[1]):
            weight_T1 = weights_TK[block, k, None]
            if weight_T1.any():
                taken_TV = rows_SV[np.minimum(first_T[block] + k, count - 1)]
                sum_TV += weight_T1 * taken_TV
        made_TV[block] = np.clip(sum_TV >> bits, 0, 255)
    return made_TV.reshape(size, *inner)


def _weights(source: int, target: int, filter: int) -> _Weights:
    reach, weigh = _FILTERS[filter]
    scale = source / target
    stretch = max(scale, 1.0)
    center_T = scale * (np.arange(target) + 0.5)
    first_T = np.maximum((center_T - reach * stretch + 0.5).astype(np.int64), 0)
    end_T = np.minimum((center_T + reach * stretch + 0.5).astype(np.int64), source)
    most = min(int((end_T - first_T).max()), math.ceil(reach * stretch) * 2 + 1)
    at_TK = first_T[:, None] + np.arange(most)
    weights_TK = weigh(np.abs(at_TK - center_T[:, None] + 0.5) * (1.0 / stretch))
    weights_TK[at_TK >= end_T[:, None]] = 0.0
    weights_TK /= weights_TK.sum(1, keepdims=True)
    bits, largest = 0, weights_TK.max()
    while bits < _MOST_WEIGHT_BITS and int(0.5 + largest * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    whole_TK = np.trunc(weights_TK * (1 << bits) + np.where(weights_TK < 0, -0.5, 0.5))
    return _Weights(first_T, whole_TK.astype(np.int32), bits)


def _bicubic(distance: np.ndarray) -> np.ndarray:
    near = ((_A + 2) * distance - (_A + 3)) * distance * distance + 1
    far = (((distance - 5) * distance + 8) * distance - 4) * _A
    return np.where(distance < 1, near, np.where(distance < 2, far, 0.0))


def _bilinear(distance: np.ndarray) -> np.ndarray:
    return np.maximum(1.0 - distance, 0.0)


_FILTERS: dict[int, tuple[float, Callable[[np.ndarray], np.ndarray]]] = {
    BILINEAR: (1.0, _bilinear),
    BICUBIC: (2.0, _bicubic),
}
