"""Moments in fewer bits: encoding twice changes nothing, errors are bounded, and their mean is zero."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollgraph.parallel.data.bucket_plan import BLOCK, SIGNED_OCTAVES, UNSIGNED_OCTAVES, StateFormat, state_fields
from rollgraph.parallel.optim.codecs import NEAREST, NOISE_BITS, MomentCodec, RoundingNoise, _spread
from tests.interpreter import run_interpreted

SHORT: tuple[StateFormat, ...] = ("bf16", "int8")


def encode_moments(
    state: StateFormat, exp_avg: Tensor, exp_avg_sq: Tensor, noise: tuple[Tensor, Tensor]
) -> dict[str, Tensor]:
    fields = {f.name: torch.empty(f.entries(exp_avg.numel()), dtype=f.dtype) for f in state_fields(state)}
    MomentCodec(state, "cpu").encode(exp_avg, exp_avg_sq, noise, fields)
    del fields["master"]
    return fields


def decode_moments(state: StateFormat, fields: dict[str, Tensor], elements: int) -> tuple[Tensor, Tensor]:
    moments = torch.empty(elements), torch.empty(elements)
    MomentCodec(state, "cpu").decode(fields, *moments)
    return moments


def random_noise(elements: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    lower, upper = torch.randint(1 << NOISE_BITS, (2, elements), dtype=torch.int32, generator=generator)
    return lower, upper


def any_values(elements: int, octaves: float, generator: torch.Generator) -> Tensor:
    """Finite numbers of both signs within `octaves` around a random exponent, some of them zero."""
    exponents = torch.rand(elements, generator=generator, dtype=torch.float64) * octaves
    centre = 254 * torch.rand((), generator=generator, dtype=torch.float64) - 127
    values = torch.randn(elements, generator=generator, dtype=torch.float64) * 2 ** (exponents + centre - octaves / 2)
    values[torch.rand(elements, generator=generator) < 0.1] = 0.0
    return values.clamp(-3e38, 3e38).float()


@given(seed=st.integers(0, 2**32), octaves=st.floats(0, 200))
@settings(max_examples=60, deadline=None)
def test_encoding_decoded_moments_changes_nothing(seed: int, octaves: float) -> None:
    """Whatever the random bits are, so a skipped step leaves the state as it is."""
    generator = torch.Generator().manual_seed(seed)
    elements = 4 * BLOCK
    exp_avg, exp_avg_sq = any_values(elements, octaves, generator), any_values(elements, octaves, generator).abs()
    for state in SHORT:
        first = encode_moments(state, exp_avg, exp_avg_sq, random_noise(elements, generator))
        second = encode_moments(state, *decode_moments(state, first, elements), random_noise(elements, generator))
        for name, tensor in first.items():
            assert torch.equal(tensor.view(torch.uint8), second[name].view(torch.uint8)), (state, name)


@given(seed=st.integers(0, 2**32), octaves=st.floats(0, 60))
@settings(max_examples=40, deadline=None)
def test_errors_are_less_than_a_step_of_the_format(seed: int, octaves: float) -> None:
    """A step is 2^-7 of a bf16 number and 2^-3 of an int8 code; below the smallest code, it is that code."""
    generator = torch.Generator().manual_seed(seed)
    elements = 2 * BLOCK
    exp_avg = any_values(elements, octaves, generator).clamp(-1e30, 1e30)
    exp_avg_sq = exp_avg.abs()
    normal = torch.finfo(torch.float32).smallest_normal
    for state, mantissa in (("bf16", 7), ("int8", 3)):
        moment, moment_sq = decode_moments(
            state, encode_moments(state, exp_avg, exp_avg_sq, random_noise(elements, generator)), elements
        )
        step = exp_avg.abs().double() * 2**-mantissa + normal * 2**17
        least = least_sq = torch.zeros(elements, dtype=torch.float64)
        if state == "int8":
            largest = exp_avg.abs().double().view(-1, BLOCK).amax(1, keepdim=True)
            least = (largest * 2**-SIGNED_OCTAVES * 2.25).expand(-1, BLOCK).flatten()
            least_sq = (largest * 2**-UNSIGNED_OCTAVES * 2.25).expand(-1, BLOCK).flatten()
        assert torch.all((moment.double() - exp_avg.double()).abs() <= step + least)
        assert torch.all((moment_sq.double() - exp_avg_sq.double()).abs() <= step + least_sq)
        assert not torch.any((moment_sq == 0) & (exp_avg_sq >= normal))  # an update divides by it
        nearest = torch.full((elements,), NEAREST, dtype=torch.int32)
        moment, _ = decode_moments(state, encode_moments(state, exp_avg, exp_avg_sq, (nearest, nearest)), elements)
        assert torch.all((moment.double() - exp_avg.double()).abs() <= step / 2 + least)


@pytest.mark.parametrize("state", SHORT)
def test_the_mean_over_all_random_bits_is_the_value(state: StateFormat) -> None:
    """Exhaustively, in blocks of its own for each value. A small one beside a large one rounds to zero or one code."""
    every = torch.arange(1 << NOISE_BITS, dtype=torch.int32)
    for value in (1.0, 1.06, -1.3e-5, 1.9999, 3.3e-3, -7e20):
        exp_avg = torch.full((1 << NOISE_BITS,), value)
        moment, moment_sq = decode_moments(
            state, encode_moments(state, exp_avg, exp_avg.abs(), (every, every)), every.numel()
        )
        step = abs(value) / 8
        assert abs(moment.double().mean() - exp_avg[0].double()) <= step * 2**-15
        assert abs(moment_sq.double().mean() - exp_avg[0].double().abs()) <= step * 2**-15
    small = 1.5e-5  # of the largest value in its block: between zero and the smallest code
    exp_avg = torch.full((BLOCK << NOISE_BITS,), 1.0).view(-1, BLOCK)
    exp_avg[:, 5] = small
    noise = torch.zeros_like(exp_avg, dtype=torch.int32)
    noise[:, 5] = every
    exp_avg, noise = exp_avg.flatten(), noise.flatten()
    moment, _ = decode_moments(state, encode_moments(state, exp_avg, exp_avg, (noise, noise)), exp_avg.numel())
    assert abs(moment.view(-1, BLOCK)[:, 5].double().mean() - small) <= 2.0**-SIGNED_OCTAVES * 2**-15


def test_random_bits_depend_only_on_update_position_and_seed() -> None:
    elements = 1 << 14
    noise = RoundingNoise("cpu", seed=3)

    def draw(update: int, first: int = 0, source: RoundingNoise = noise) -> tuple[Tensor, Tensor]:
        source.start_update(torch.tensor(float(update)))
        return source.draw(first, elements)

    lower, upper = draw(7)
    again = draw(7, source=RoundingNoise("cpu", seed=3))
    assert torch.equal(lower, again[0])
    assert torch.equal(upper, again[1])
    others = [draw(8), draw(7, first=elements), draw(7, source=RoundingNoise("cpu", seed=4))]
    samples = [lower, upper, *(part for pair in others for part in pair)]
    spread = (1 << NOISE_BITS) / math.sqrt(12)
    for sample in samples:
        assert 0 <= int(sample.min()) < int(sample.max()) < 1 << NOISE_BITS
        assert abs(sample.double().mean() - (1 << NOISE_BITS) / 2) < 6 * spread / math.sqrt(elements)
    table = torch.corrcoef(torch.stack([*samples, lower.roll(1), upper.roll(1)]).double())
    table.fill_diagonal_(0)
    assert float(table.abs().max()) < 6 / math.sqrt(elements)


# -- kernels ---------------------------------------------------------------------------------------


def compare_kernels(device: str) -> None:
    """The kernels have the bits of the plain versions on a CPU, for numbers of any size."""
    from rollgraph.parallel.optim import codec_kernels

    elements = 37 * BLOCK
    for seed, octaves in enumerate((0.0, 3.0, 20.0, 60.0, 200.0)):
        generator = torch.Generator().manual_seed(seed)
        moments = any_values(elements, octaves, generator), any_values(elements, octaves, generator).abs()
        noise = RoundingNoise("cpu", seed)
        noise.start_update(torch.tensor(5.0 + seed))
        first = 10**10 * seed
        device_moments = [tensor.to(device) for tensor in moments]
        for state, encode in (("int8", codec_kernels.encode_int8), ("bf16", codec_kernels.encode_bf16)):
            expected = encode_moments(state, *moments, noise.draw(first, elements))
            fields = {name: torch.empty_like(tensor, device=device) for name, tensor in expected.items()}
            encode(*device_moments, noise.salt.to(device), _spread(first), fields)
            for name, tensor in expected.items():
                assert torch.equal(fields[name].cpu(), tensor), (state, name, octaves)
        expected = encode_moments("int8", *moments, noise.draw(first, elements))
        results = [torch.empty_like(tensor) for tensor in device_moments]
        codec_kernels.decode_int8({name: tensor.to(device) for name, tensor in expected.items()}, *results)
        for result, value in zip(results, decode_moments("int8", expected, elements), strict=True):
            assert torch.equal(result.cpu(), value), octaves


@pytest.mark.slow
def test_kernels_have_the_same_bits_in_the_interpreter() -> None:
    run_interpreted(compare_kernels)


@pytest.mark.gpu
def test_kernels_have_the_same_bits() -> None:
    compare_kernels("cuda")
