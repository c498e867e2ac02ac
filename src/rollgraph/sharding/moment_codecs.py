"""Moments in two bytes or in one: encoding and decoding, with random rounding that is unbiased.

An update changes a moment by less than the spacing of short numbers (by 0.1% with a beta of 0.999), so rounding to the
nearest one would undo it, always. Rounding up with a probability in proportion to the remainder keeps the mean.

- bf16: the upper half of the fp32 number.
- int8: floating-point codes with three bits of mantissa, counted from an exponent that a block of 64 elements shares.
  The first moment has a sign and 15 octaves below the octave of the block's largest value, the second moment 31.

Decoding is exact, and encoding what was decoded returns the same codes, whatever the random bits are. So a skipped
update changes nothing, and no decision has to reach the host.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rollgraph.sharding.state_memory import (
    BLOCK,
    LOWEST_SIGNED,
    LOWEST_UNSIGNED,
    SIGNED_OCTAVES,
    UNSIGNED_OCTAVES,
    StateFormat,
)

NOISE_BITS = 16
NEAREST = 1 << (NOISE_BITS - 1)  # as random bits, this rounds to the nearest number
_MANTISSA = 3  # bits of an int8 code
_DROPPED = 23 - _MANTISSA  # bits of an fp32 number that a code does not have
_STEPS = 1 << _MANTISSA  # codes in an octave
_LARGEST_EXPONENT = 254  # of a finite fp32 number
_MAGNITUDE = 0x7FFFFFFF


class MomentCodec:
    """Converts between fp32 moments and one format, in which they are stored.

    On a GPU both directions are kernels of `moment_kernels.py`, which give the same bits: a chain of plain operations
    would read and write the same memory many times.
    """

    def __init__(self, state: StateFormat, device: torch.device | str) -> None:
        self.state = state
        self._kernels = torch.device(device).type == "cuda"
        self._signed = _code_values(SIGNED_OCTAVES, signed=True).to(device)  # [256]
        self._unsigned = _code_values(UNSIGNED_OCTAVES, signed=False).to(device)  # [256]

    def decode(self, fields: Mapping[str, Tensor], exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Write the stored moments to two fp32 tensors."""
        if self.state != "int8":
            exp_avg.copy_(fields["exp_avg"])
            exp_avg_sq.copy_(fields["exp_avg_sq"])
        elif self._kernels:
            from rollgraph.sharding.moment_kernels import decode_int8

            decode_int8(fields, exp_avg, exp_avg_sq)
        else:
            _decode_blocks(self._signed, fields["exp_avg"], fields["exp_avg_exponents"], exp_avg)
            _decode_blocks(self._unsigned, fields["exp_avg_sq"], fields["exp_avg_sq_exponents"], exp_avg_sq)

    def encode_randomly(
        self, exp_avg: Tensor, exp_avg_sq: Tensor, noise: RoundingNoise, first: int, fields: Mapping[str, Tensor]
    ) -> None:
        """Store the fp32 moments of the elements from `first` on, rounded with random bits."""
        if not self._kernels:
            self.encode(exp_avg, exp_avg_sq, noise.draw(first, exp_avg.numel()), fields)
            return
        from rollgraph.sharding import moment_kernels

        encode = moment_kernels.encode_int8 if self.state == "int8" else moment_kernels.encode_bf16
        encode(exp_avg, exp_avg_sq, noise.salt, _spread(first), fields)

    def encode(
        self, exp_avg: Tensor, exp_avg_sq: Tensor, noise: tuple[Tensor, Tensor], fields: Mapping[str, Tensor]
    ) -> None:
        """Store fp32 moments. `noise` has int32 numbers of `NOISE_BITS` bits, for each of the two."""
        if self.state == "int8":
            _encode_signed(exp_avg, noise[0], self._signed, fields["exp_avg"], fields["exp_avg_exponents"])
            _encode_unsigned(exp_avg_sq, noise[1], fields["exp_avg_sq"], fields["exp_avg_sq_exponents"])
        elif self.state == "bf16":
            fields["exp_avg"].copy_(_round_to_bf16(exp_avg, noise[0]))
            fields["exp_avg_sq"].copy_(_round_to_bf16(exp_avg_sq, noise[1]))
        else:
            fields["exp_avg"].copy_(exp_avg)
            fields["exp_avg_sq"].copy_(exp_avg_sq)


def _round_to_bf16(values: Tensor, noise: Tensor) -> Tensor:
    return values.view(torch.int32).add(noise).bitwise_right_shift_(NOISE_BITS).to(torch.int16).view(torch.bfloat16)


# -- int8 ------------------------------------------------------------------------------------------


def _code_values(octaves: int, *, signed: bool) -> Tensor:
    """What each byte means in a block whose exponent is 0, as fp32. The code 0 is zero."""
    largest = 127 if signed else 255
    codes = torch.arange(1, largest + 1)
    mantissas = 1 + (codes % _STEPS) / _STEPS
    values = torch.zeros(256)
    values[1 : largest + 1] = torch.ldexp(mantissas, codes // _STEPS - octaves)
    if signed:
        values[129:] = -values[1:128].flip(0)  # -1 is the byte 255
    return values


def _decode_blocks(meaning: Tensor, codes: Tensor, exponents: Tensor, values: Tensor) -> None:
    found = meaning.index_select(0, codes.view(torch.uint8).int())
    torch.mul(found.view(-1, BLOCK), _powers_of_two(exponents.int()[:, None]), out=values.view(-1, BLOCK))


def _powers_of_two(exponents: Tensor) -> Tensor:
    """Numbers with these exponents, spelled as in fp32, and a mantissa of 1."""
    return exponents.bitwise_left_shift(23).view(torch.float32)


def _count_steps(values: Tensor, noise: Tensor, lowest: int) -> tuple[Tensor, Tensor]:
    """Round magnitudes, and count their steps of 1/8 octave from 0, in blocks; also the exponent of each block."""
    steps = noise.bitwise_left_shift(_DROPPED - NOISE_BITS)
    steps += values.view(torch.int32) & _MAGNITUDE
    steps = steps.bitwise_right_shift_(_DROPPED).view(-1, BLOCK)
    exponents = steps.amax(1, keepdim=True).bitwise_right_shift_(_MANTISSA).clamp_(lowest, _LARGEST_EXPONENT)
    return steps, exponents


def _encode_signed(values: Tensor, noise: Tensor, meaning: Tensor, codes: Tensor, exponents: Tensor) -> None:
    steps, shared = _count_steps(values, noise, LOWEST_SIGNED)
    steps -= (shared - SIGNED_OCTAVES) * _STEPS
    # What lies below the smallest code is that code or 0, at random: a small first moment still counts, on average.
    smallest = _powers_of_two(shared) * meaning[1]
    thresholds = noise.view(-1, BLOCK) * (smallest / (1 << NOISE_BITS))
    below = values.view(-1, BLOCK).abs() > thresholds
    del thresholds
    steps = torch.where(steps < 1, below.int(), steps.clamp_(max=127))
    codes.copy_(torch.copysign(steps.view(-1), values))
    exponents.copy_(shared.view(-1))


def _encode_unsigned(values: Tensor, noise: Tensor, codes: Tensor, exponents: Tensor) -> None:
    steps, shared = _count_steps(values, noise, LOWEST_UNSIGNED)
    steps -= (shared - UNSIGNED_OCTAVES) * _STEPS
    # Only 0 becomes 0: a moment divides, and one that is too small to be stored must not blow up an update.
    steps.clamp_(1, 255)
    steps *= values.view(-1, BLOCK) > 0
    codes.copy_(steps.view(-1))
    exponents.copy_(shared.view(-1))


# -- random bits -----------------------------------------------------------------------------------


class RoundingNoise:
    """Random bits for each element of each update: a hash of the update's number, the element's place and a seed.

    There is no state, so an update gives the same bits when it is repeated after a checkpoint.
    """

    def __init__(self, device: torch.device | str, seed: int = 0) -> None:
        self._seed = _spread(seed)
        self.salt = torch.zeros(1, dtype=torch.int32, device=device)  # a hash of all but the place

    def start_update(self, number: Tensor) -> None:
        """Use the bits of this update; its number stays on the device."""
        self.salt.copy_(_mix(number.to(torch.int32).view(1) + self._seed))

    def draw(self, first: int, elements: int) -> tuple[Tensor, Tensor]:
        """Two numbers of `NOISE_BITS` bits for each of the elements from `first` on."""
        bits = torch.arange(elements, dtype=torch.int32, device=self.salt.device)
        bits = _mix(bits.add_(self.salt).add_(_spread(first)))
        upper = bits.bitwise_right_shift(NOISE_BITS).bitwise_and_(0xFFFF)
        return bits.bitwise_and_(0xFFFF), upper


def _mix(bits: Tensor) -> Tensor:
    """A hash of each number, in place: every bit of the input changes every bit of the output half of the time."""
    _fold(bits, 16).mul_(0x7FEB352D)
    _fold(bits, 15).mul_(_as_int32(0x846CA68B))
    return _fold(bits, 16)


def _fold(bits: Tensor, shift: int) -> Tensor:
    # A right shift of int32 repeats the sign, which is no part of the number here.
    return bits.bitwise_xor_(bits.bitwise_right_shift(shift).bitwise_and_((1 << (32 - shift)) - 1))


def _spread(number: int) -> int:
    """Another number for each one, far from those of its neighbours."""
    return _as_int32(number * 0x9E3779B97F4A7C15 >> 32)


def _as_int32(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31
