"""Sampling on a CPU as loops compiled by Numba. `sampler.py` calls them and defines the noise.

Every function that the loops call is in this file: Numba's cache on disk is invalidated when this file changes, but not
when another one does.
"""

from __future__ import annotations

import math

import numpy as np

from rollgraph.model.kernels.cpu_kernels import compiled

_MAX_UNIFORM = np.float32(1 - 2.0**-24)
_LN2_HIGH = np.float32(0.693359375)  # few digits, so its products with small integers are exact
_LN2_LOW = np.float32(math.log(2) - 0.693359375)
_HALF_ROOT = np.float32(math.sqrt(0.5))
_MANTISSA = np.int32(0x007FFFFF)
_HALF_BITS = np.int32(0x3F000000)
# The coefficients of Cephes: log(1 + x) = x - x²/2 + x³ p(x) for x from √½ - 1 to √2 - 1.
_P0, _P1, _P2 = np.float32(7.0376836292e-2), np.float32(-1.1514610310e-1), np.float32(1.1676998740e-1)
_P3, _P4, _P5 = np.float32(-1.2420140846e-1), np.float32(1.4249322787e-1), np.float32(-1.6668057665e-1)
_P6, _P7, _P8 = np.float32(2.0000714765e-1), np.float32(-2.4999993993e-1), np.float32(3.3333331174e-1)


@compiled
def _log(x):
    """The logarithm of a positive, normal float32."""
    bits = np.float32(x).view(np.int32)
    exponent = np.int32(np.int32(bits >> np.int32(23)) - np.int32(126))
    fraction = np.int32((bits & _MANTISSA) | _HALF_BITS).view(np.float32)  # from 0.5 to 1
    low = fraction < _HALF_ROOT
    power = np.float32(np.int32(exponent - np.int32(low)))
    x = (fraction + fraction if low else fraction) - np.float32(1)
    square = x * x
    series = ((((((((_P0 * x + _P1) * x + _P2) * x + _P3) * x + _P4) * x + _P5) * x + _P6) * x + _P7) * x) + _P8
    series = series * x * square + power * _LN2_LOW - np.float32(0.5) * square
    return x + series + power * _LN2_HIGH


@compiled
def _mix(x):
    x = np.uint32((x ^ np.uint32(x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32((x ^ np.uint32(x >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(x ^ np.uint32(x >> np.uint32(16)))


@compiled
def _add_noise(ids, first, second, scores, noisy):
    """Write scores + `sampler.gumbel`. Each loop is simple enough for a compiler to vectorize."""
    uniform = np.empty_like(noisy)
    for j in range(len(ids)):
        bits = _mix(np.uint32(_mix(np.uint32(np.uint32(ids[j]) ^ first)) + second))
        u = (np.float32(bits) + np.float32(0.5)) * np.float32(2.0**-32)
        uniform[j] = u if u < _MAX_UNIFORM else _MAX_UNIFORM
    for j in range(len(ids)):
        noisy[j] = -_log(np.float32(1) - uniform[j])
    for j in range(len(ids)):
        u = uniform[j]
        series = u * (np.float32(1) + u * (np.float32(0.5) + u * np.float32(1 / 3)))
        noisy[j] = series if u < np.float32(2.0**-8) else noisy[j]
    for j in range(len(ids)):
        noisy[j] = scores[j] - _log(noisy[j])


@compiled
def pick(scores, ids, seeds, positions, temperatures, picked):
    """Write the index of the largest score + noise in each row, or of the largest score if the row is greedy.

    `ids`, [1, n] or [rows, n], are the ids that key the noise.
    """
    noisy = np.empty(scores.shape[1], np.float32)
    for row in range(len(scores)):
        ids_row = row if len(ids) > 1 else 0
        if temperatures[row] == 0:
            noisy[:] = scores[row]
        else:
            low, high = np.uint32(seeds[row, 0]), np.uint32(seeds[row, 1])
            position = np.uint32(positions[row])
            first = _mix(np.uint32(_mix(_mix(low) ^ high) + position))
            second = _mix(np.uint32(_mix(_mix(high ^ np.uint32(0x5BD1E995)) ^ low) + position))
            _add_noise(ids[ids_row], first, second, scores[row], noisy)
        largest, index = noisy[0], 0
        for j in range(1, len(noisy)):
            if noisy[j] > largest:
                largest, index = noisy[j], j
        picked[row] = index
