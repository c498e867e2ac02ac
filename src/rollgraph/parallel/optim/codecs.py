"""Moments in two bytes or one: encoding with unbiased stochastic rounding, and decoding.

An update changes a moment by less than the spacing of short numbers (by 0.1% with a beta of 0.999), so rounding to the
nearest number would always undo it. Rounding up with a probability proportional to the remainder preserves the mean.

- bf16: the upper half of the fp32 number.
- int8: floating-point codes with three bits of mantissa, relative to an exponent that a block of 64 elements shares.
  The first moment has a sign and 15 octaves below the octave of the block's largest value, the second moment 31.

Decoding is exact, and encoding decoded values returns the same codes, whatever the random bits are. So a skipped update
changes nothing, and the host need not know whether it was skipped.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rollgraph.parallel.data.bucket_plan import (
    BLOCK,
    LOWEST_SIGNED,
    LOWEST_UNSIGNED,
    SIGNED_OCTAVES,
    UNSIGNED_OCTAVES,
    StateFormat,
)

NOISE_BITS = 16
NEAREST = 1 << (NOISE_BITS - 1)  # with this instead of random bits, encoding rounds to the nearest number
_MANTISSA = 3  # bits of an int8 code
_DROPPED = 23 - _MANTISSA  # mantissa bits of fp32 that a code does not have
_STEPS = 1 << _MANTISSA  # codes in an octave
_LARGEST_EXPONENT = 254  # of a finite fp32 number
_MAGNITUDE = 0x7FFFFFFF


class MomentCodec:
    """Converts moments between fp32 and the stored format.

    On a GPU both directions are kernels of `codec_kernels.py`, with bitwise equal results: a chain of PyTorch
    operations would read and write the same memory many times.
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
            from rollgraph.parallel.optim.codec_kernels import decode_int8

            decode_int8(fields, exp_avg, exp_avg_sq)
        else:
            _decode_blocks(self._signed, fields["exp_avg"], fields["exp_avg_exponents"], exp_avg)
            _decode_blocks(self._unsigned, fields["exp_avg_sq"], fields["exp_avg_sq_exponents"], exp_avg_sq)

    def encode_randomly(
        self, exp_avg: Tensor, exp_avg_sq: Tensor, noise: RoundingNoise, first: int, fields: Mapping[str, Tensor]
    ) -> None:
        """Encode fp32 moments with stochastic rounding. `first` is the index of their first element."""
        if not self._kernels:
            self.encode(exp_avg, exp_avg_sq, noise.draw(first, exp_avg.numel()), fields)
            return
        from rollgraph.parallel.optim import codec_kernels

        encode = codec_kernels.encode_int8 if self.state == "int8" else codec_kernels.encode_bf16
        encode(exp_avg, exp_avg_sq, noise.salt, _spread(first), fields)

    def encode(
        self, exp_avg: Tensor, exp_avg_sq: Tensor, noise: tuple[Tensor, Tensor], fields: Mapping[str, Tensor]
    ) -> None:
        """Encode fp32 moments. `noise` has int32 numbers of `NOISE_BITS` bits for each of the two moments."""
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
    """The fp32 value of each byte in a block whose exponent is 0. The code 0 is zero."""
    largest = 127 if signed else 255
    codes = torch.arange(1, largest + 1)
    mantissas = 1 + (codes % _STEPS) / _STEPS
    values = torch.zeros(256)
    values[1 : largest + 1] = torch.ldexp(mantissas, codes // _STEPS - octaves)
    if signed:
        values[129:] = -values[1:128].flip(0)  # -1 is the byte 255
    return values


def _decode_blocks(code_values: Tensor, codes: Tensor, exponents: Tensor, values: Tensor) -> None:
    decoded = code_values.index_select(0, codes.view(torch.uint8).int())
    torch.mul(decoded.view(-1, BLOCK), _powers_of_two(exponents.int()[:, None]), out=values.view(-1, BLOCK))


def _powers_of_two(exponents: Tensor) -> Tensor:
    """Powers of two with these biased fp32 exponents."""
    return exponents.bitwise_left_shift(23).view(torch.float32)


def _count_steps(values: Tensor, noise: Tensor, lowest: int) -> tuple[Tensor, Tensor]:
    """Round magnitudes to steps of 1/8 octave, counted from 0, in blocks. Returns steps and exponent of each block."""
    steps = noise.bitwise_left_shift(_DROPPED - NOISE_BITS)
    steps += values.view(torch.int32) & _MAGNITUDE
    steps = steps.bitwise_right_shift_(_DROPPED).view(-1, BLOCK)
    exponents = steps.amax(1, keepdim=True).bitwise_right_shift_(_MANTISSA).clamp_(lowest, _LARGEST_EXPONENT)
    return steps, exponents


def _encode_signed(values: Tensor, noise: Tensor, code_values: Tensor, codes: Tensor, exponents: Tensor) -> None:
    steps, shared = _count_steps(values, noise, LOWEST_SIGNED)
    steps -= (shared - SIGNED_OCTAVES) * _STEPS
    # Values below the smallest code become that code or 0, at random, so that small first moments keep their mean.
    smallest = _powers_of_two(shared) * code_values[1]
    thresholds = noise.view(-1, BLOCK) * (smallest / (1 << NOISE_BITS))
    below = values.view(-1, BLOCK).abs() > thresholds
    del thresholds
    steps = torch.where(steps < 1, below.int(), steps.clamp_(max=127))
    codes.copy_(torch.copysign(steps.view(-1), values))
    exponents.copy_(shared.view(-1))


def _encode_unsigned(values: Tensor, noise: Tensor, codes: Tensor, exponents: Tensor) -> None:
    steps, shared = _count_steps(values, noise, LOWEST_UNSIGNED)
    steps -= (shared - UNSIGNED_OCTAVES) * _STEPS
    # Only 0 becomes 0: updates divide by this moment, and rounding a tiny one to 0 would blow up an update.
    steps.clamp_(1, 255)
    steps *= values.view(-1, BLOCK) > 0
    codes.copy_(steps.view(-1))
    exponents.copy_(shared.view(-1))


# -- random bits -----------------------------------------------------------------------------------


class RoundingNoise:
    """Random bits for each element of each update: a hash of the update's number, the element's index and a seed.

    There is no state, so an update that is repeated after a checkpoint has the same bits.
    """

    def __init__(self, device: torch.device | str, seed: int = 0) -> None:
        self._seed = _spread(seed)
        self.salt = torch.zeros(1, dtype=torch.int32, device=device)  # a hash of the update's number and the seed

    def start_update(self, number: Tensor) -> None:
        """Use the bits of this update, whose number stays on the device."""
        self.salt.copy_(_mix(number.to(torch.int32).view(1) + self._seed))

    def draw(self, first: int, elements: int) -> tuple[Tensor, Tensor]:
        """Two numbers of `NOISE_BITS` bits for each element, of which `first` is the index of the first."""
        bits = torch.arange(elements, dtype=torch.int32, device=self.salt.device)
        bits = _mix(bits.add_(self.salt).add_(_spread(first)))
        upper = bits.bitwise_right_shift(NOISE_BITS).bitwise_and_(0xFFFF)
        return bits.bitwise_and_(0xFFFF), upper


def _mix(bits: Tensor) -> Tensor:
    """Hash each number, in place: each input bit changes each output bit half of the time."""
    _fold(bits, 16).mul_(0x7FEB352D)
    _fold(bits, 15).mul_(_as_int32(0x846CA68B))
    return _fold(bits, 16)


def _fold(bits: Tensor, shift: int) -> Tensor:
    # A right shift of int32 repeats the sign bit, so mask it: the numbers are unsigned here.
    return bits.bitwise_xor_(bits.bitwise_right_shift(shift).bitwise_and_((1 << (32 - shift)) - 1))


def _spread(number: int) -> int:
    """A multiplicative hash: neighbouring numbers get distant values."""
    return _as_int32(number * 0x9E3779B97F4A7C15 >> 32)


def _as_int32(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31
