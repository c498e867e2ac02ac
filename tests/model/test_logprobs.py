"""Log-probabilities in chunks equal the plain formula, values and gradients, without needing its memory."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from rollgraph.graph import capture
from rollgraph.model import token_logprobs
from rollgraph.model.logprobs import _gradient, reduce_logits
from tests.interpreter import run_interpreted

TOKENS, HIDDEN, VOCABULARY = 12, 8, 29
CHUNKS = [None, 1, 4, 5, 12, 100]
TEMPERATURES = {
    "one": 1.0,
    "number": 0.7,
    "scalar": torch.tensor(1.9, dtype=torch.float64),
    "one in a row": torch.tensor([0.6], dtype=torch.float64),
    "one for each token": torch.linspace(0.3, 3, TOKENS, dtype=torch.float64),
}


def example(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float64).to(dtype).requires_grad_()
    lm_head = torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, lm_head, torch.randint(VOCABULARY, (TOKENS,))


def plain(hidden: Tensor, lm_head: Tensor, targets: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.as_tensor(temperature, dtype=hidden.dtype).expand(len(hidden))[:, None]
    log_p = (hidden @ lm_head.t() / scale).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def logprobs_and_entropy(*args: Any, chunk: int | None = None) -> tuple[Tensor, Tensor]:
    return cast(tuple[Tensor, Tensor], token_logprobs(*args, entropy=True, chunk=chunk))


def logprobs_only(*args: Any, chunk: int | None = None) -> Tensor:
    return cast(Tensor, token_logprobs(*args, chunk=chunk))


def close(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("temperature", TEMPERATURES.values(), ids=TEMPERATURES)
def test_values_and_gradients_equal_the_plain_formula(temperature: float | Tensor, chunk: int | None) -> None:
    hidden, lm_head, targets = example()
    expected = plain(hidden, lm_head, targets, temperature)
    results = logprobs_and_entropy(hidden, lm_head, targets, temperature, chunk=chunk)
    close(results, expected)
    upstream = torch.randn(2, TOKENS, dtype=torch.float64)
    expected_gradients = torch.autograd.grad(expected, (hidden, lm_head), tuple(upstream), retain_graph=True)
    close(torch.autograd.grad(results, (hidden, lm_head), tuple(upstream), retain_graph=True), expected_gradients)
    for index in (0, 1):  # only the log-probabilities have a gradient, then only the entropies
        expected_gradients = torch.autograd.grad(expected[index], (hidden, lm_head), upstream[index], retain_graph=True)
        close(
            torch.autograd.grad(results[index], (hidden, lm_head), upstream[index], retain_graph=True),
            expected_gradients,
        )


@pytest.mark.parametrize("chunk", CHUNKS)
def test_log_probabilities_alone_equal_the_plain_formula(chunk: int | None) -> None:
    hidden, lm_head, targets = example()
    expected = plain(hidden, lm_head, targets, 0.7)[0]
    logprobs = logprobs_only(hidden, lm_head, targets, 0.7, chunk=chunk)
    close(logprobs, expected)
    upstream = torch.randn(TOKENS, dtype=torch.float64)
    expected_gradients = torch.autograd.grad(expected, (hidden, lm_head), upstream)
    close(torch.autograd.grad(logprobs, (hidden, lm_head), upstream), expected_gradients)


def test_an_expanded_gradient_is_accepted() -> None:
    """`sum().backward()` sends one number with stride 0."""
    hidden, lm_head, targets = example()
    expected = torch.autograd.grad(plain(hidden, lm_head, targets, 1.0)[0].sum(), (hidden, lm_head))
    close(torch.autograd.grad(logprobs_only(hidden, lm_head, targets, chunk=5).sum(), (hidden, lm_head)), expected)


@pytest.mark.parametrize("trained", [0, 1])
def test_only_one_of_the_factors_may_need_a_gradient(trained: int) -> None:
    *weights, targets = example()
    upstream = torch.randn(TOKENS, dtype=torch.float64)
    (expected,) = torch.autograd.grad(logprobs_only(*weights, targets, chunk=5), weights[trained], upstream)
    weights[1 - trained].requires_grad_(False)
    logprobs_only(*weights, targets, chunk=5).backward(upstream)
    assert weights[1 - trained].grad is None
    assert torch.equal(cast(Tensor, weights[trained].grad), expected)


def test_int32_targets_and_no_tokens_are_accepted() -> None:
    hidden, lm_head, targets = example()
    assert torch.equal(logprobs_only(hidden, lm_head, targets.int()), logprobs_only(hidden, lm_head, targets))
    logprobs, entropy = logprobs_and_entropy(hidden[:0], lm_head, targets[:0], 0.5)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.equal(cast(Tensor, lm_head.grad), torch.zeros_like(lm_head))


def test_large_logits_do_not_overflow() -> None:
    hidden, lm_head, targets = example(torch.float32)
    results = logprobs_and_entropy(hidden * 1e4, lm_head, targets, 1e-2, chunk=5)
    expected = plain(hidden.double() * 1e4, lm_head.double(), targets, 1e-2)
    torch.testing.assert_close(results, tuple(t.float() for t in expected), rtol=1e-4, atol=1e-4)
    (results[0].sum() + results[1].sum()).backward()
    assert bool(torch.isfinite(cast(Tensor, hidden.grad)).all())


@pytest.mark.parametrize("chunk", [None, 5])
def test_a_second_derivative_is_refused(chunk: int | None) -> None:
    """If it were silently left out, a gradient penalty would have no effect."""
    hidden, lm_head, targets = example()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(logprobs_only(hidden, lm_head, targets, chunk=chunk).sum(), hidden, create_graph=True)


def test_a_gradient_for_the_temperature_is_refused() -> None:
    hidden, lm_head, targets = example()
    temperature = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="temperature requires a gradient"):
        logprobs_only(hidden, lm_head, targets, temperature)
    without_gradient = logprobs_only(hidden, lm_head, targets, temperature.detach())
    with torch.no_grad():
        assert torch.equal(logprobs_only(hidden, lm_head, targets, temperature), without_gradient)


def check_precision(
    device: str,
    dtype: torch.dtype,
    chunk: int | None,
    vocabulary: int,
    value_tolerance: float,
    gradient_tolerance: float,
) -> None:
    """Compare with float64 on the same inputs. The error of a gradient is relative to its norm."""
    hidden = torch.randn(TOKENS, HIDDEN, device=device).to(dtype).requires_grad_()
    lm_head = torch.randn(vocabulary, HIDDEN, device=device).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (TOKENS,), device=device)
    wide = [t.detach().double().cpu().requires_grad_() for t in (hidden, lm_head)]
    expected = plain(*wide, targets.cpu(), 0.7)
    results = logprobs_and_entropy(hidden, lm_head, targets, 0.7, chunk=chunk)
    assert {t.dtype for t in results} == {torch.float32}
    close([t.double().cpu() for t in results], list(expected), value_tolerance)
    upstream = tuple(torch.randn(2, TOKENS))
    expected_gradients = torch.autograd.grad(expected, wide, tuple(t.double() for t in upstream))
    gradients = torch.autograd.grad(results, (hidden, lm_head), tuple(t.to(device) for t in upstream))
    assert {t.dtype for t in gradients} == {dtype}
    for gradient, exact in zip(gradients, expected_gradients, strict=True):
        assert (gradient.double().cpu() - exact).norm() < gradient_tolerance * exact.norm()


@pytest.mark.parametrize("chunk", [None, 5])
def test_lower_precision_stays_near_float64(chunk: int | None) -> None:
    """A CPU rounds the logits of a bf16 model to bf16, which has a precision of 8 bits."""
    check_precision("cpu", torch.float32, chunk, VOCABULARY, 1e-5, 1e-5)
    check_precision("cpu", torch.bfloat16, chunk, VOCABULARY, 5e-2, 5e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("vocabulary", [VOCABULARY, 4096, 9001])
def test_precision_on_cuda(vocabulary: int, chunk: int | None) -> None:
    """CUDA does not round them: values are those of fp32, and only the gradient of the logits is rounded to bf16."""
    check_precision("cuda", torch.float32, chunk, vocabulary, 1e-4, 1e-4)
    check_precision("cuda", torch.bfloat16, chunk, vocabulary, 1e-4, 2e-2)


def compare_kernels(device: str) -> None:
    """Compare the Triton kernels with plain PyTorch. Only rows whose target does not exist are NaN."""
    from rollgraph.model.kernels.logprobs import fused_logprobs, fused_logprobs_backward

    for vocabulary in (29, 5000):
        generator = torch.Generator().manual_seed(vocabulary)
        logits, upstream = (torch.randn(size, generator=generator) for size in ((6, vocabulary), (2, 6)))
        scale = torch.linspace(0.5, 2, 6)[:, None]
        targets = torch.tensor([0, vocabulary - 1, -1, vocabulary, 7, 2**31 - 1])
        known, unknown = [0, 1, 4], [2, 3, 5]
        expected = reduce_logits(logits, scale, targets.clamp(0, vocabulary - 1), True)
        expected_gradient = _gradient(logits, torch.float32, True, targets, scale, *expected[1:], *upstream)
        for kind in (torch.int32, torch.int64):
            rows = [t.to(device) for t in (scale, targets.to(kind))]
            logprobs, *others = fused_logprobs(logits.to(device), *rows, True)
            torch.testing.assert_close(logprobs.cpu()[known], expected[0][known], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close([t.cpu() for t in others], list(expected[1:]), rtol=1e-5, atol=1e-5)
            gradient = fused_logprobs_backward(
                logits.to(device), torch.float32, True, *rows[::-1], *others, *upstream.to(device)
            ).cpu()
            torch.testing.assert_close(gradient[known], expected_gradient[known], rtol=1e-5, atol=1e-5)
            assert bool(logprobs.cpu()[unknown].isnan().all())
            assert bool(gradient[unknown].isnan().all())


def test_the_kernels_equal_plain_pytorch() -> None:
    """In Triton's interpreter, which has to be chosen before Triton is imported."""
    run_interpreted(compare_kernels)


@pytest.mark.gpu
def test_the_kernels_equal_plain_pytorch_on_cuda() -> None:
    compare_kernels("cuda")


def test_a_target_outside_the_vocabulary_is_an_error() -> None:
    hidden, lm_head, targets = example()
    for target in (-1, VOCABULARY):
        targets[3] = target
        with pytest.raises(RuntimeError, match="out of bounds"):
            logprobs_only(hidden, lm_head, targets)


def test_the_head_gradient_of_many_chunks_is_summed_in_fp32() -> None:
    """With the same token 256 times, a sum in bf16 would stop growing."""
    hidden = torch.randn(1, HIDDEN).expand(256, HIDDEN).bfloat16()
    lm_head = torch.randn(VOCABULARY, HIDDEN).bfloat16().requires_grad_()
    targets = torch.zeros(256, dtype=torch.long)
    (once,) = torch.autograd.grad(logprobs_only(hidden[:1], lm_head, targets[:1]), lm_head, torch.ones(1))
    (often,) = torch.autograd.grad(logprobs_only(hidden, lm_head, targets, chunk=1), lm_head, torch.ones(256))
    assert torch.equal(often, once * 256)


class Sizes(TorchDispatchMode):
    """Records the largest tensor that any operation returns, and counts GEMMs."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.gemms = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.gemms += func.overloadpacket == torch.ops.aten.mm
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.numel())
        return result


@pytest.mark.parametrize("entropy", [False, True])
def test_the_full_matrix_of_logits_never_exists(entropy: bool) -> None:
    """No tensor is larger than the logits of a chunk, in forward or backward. With the plain formula, one is."""
    tokens, hidden_size, vocabulary, chunk = 96, 4, 64, 8
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    lm_head = torch.randn(vocabulary, hidden_size, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    with Sizes() as sizes:
        result = token_logprobs(hidden, lm_head, targets, 0.5, entropy=entropy, chunk=chunk)
        sum(t.sum() for t in (result if isinstance(result, tuple) else (result,))).backward()
    assert hidden.grad is not None
    assert sizes.largest == chunk * vocabulary
    with Sizes() as sizes:
        plain(hidden, lm_head, targets, 0.5)
    assert sizes.largest == tokens * vocabulary


@pytest.mark.parametrize(("chunk", "gemms"), [(TOKENS, 3), (TOKENS // 2, 8)])
def test_logits_are_computed_twice_only_if_there_are_several_chunks(chunk: int, gemms: int) -> None:
    """One GEMM in forward and two for the gradients, and another one in backward if the logits were not kept."""
    hidden, lm_head, targets = example()
    with Sizes() as sizes:
        logprobs_only(hidden, lm_head, targets, chunk=chunk).sum().backward()
    assert sizes.gemms == gemms


@pytest.mark.gpu
def test_more_logits_than_32_bits_can_count() -> None:
    """Whole and in chunks give the same, even in rows that begin beyond 2**31 elements."""
    tokens, vocabulary = 16384, 151936
    hidden = torch.randn(tokens, 64, device="cuda").bfloat16().requires_grad_()
    lm_head = (torch.randn(vocabulary, 64, device="cuda") / 4).bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device="cuda")
    upstream = torch.randn(tokens, device="cuda")
    results = []
    for chunk in (tokens, 1024):
        logprobs = logprobs_only(hidden, lm_head, targets, chunk=chunk)
        results.append((logprobs.detach(), *torch.autograd.grad(logprobs, (hidden, lm_head), upstream)))
    for whole, in_chunks in zip(*results, strict=True):
        torch.testing.assert_close(whole, in_chunks, rtol=2e-2, atol=2e-2 * float(in_chunks.abs().max()))


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("chunk", [None, 5])
def test_replays_of_a_tape_equal_eager(entropy: bool, chunk: int | None) -> None:
    """Loss and gradients of a replay equal eager bit for bit, at a temperature that changes with every call."""
    _, lm_head, _ = example(torch.float32)
    layer = torch.nn.Linear(HIDDEN, HIDDEN)

    def loss(x: Tensor, targets: Tensor, weights: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        result = token_logprobs(layer(x), lm_head, targets, temperature, entropy=entropy, chunk=chunk)
        logprobs, entropies = result if isinstance(result, tuple) else (result, result)
        total = (logprobs * weights).sum() + (entropies * 0.1).mean()
        total.backward()
        return total.detach(), logprobs.detach()

    def arguments() -> tuple[Tensor, ...]:
        targets = torch.randint(VOCABULARY, (TOKENS,))
        return torch.randn(TOKENS, HIDDEN), targets, torch.randn(TOKENS), torch.rand(()) + 0.5

    leaves = [lm_head, *layer.parameters()]
    graphed = capture(loss, arguments(), backend="tape")
    for _ in range(3):
        inputs = arguments()
        results = []
        for function in (graphed, loss):
            for leaf in leaves:
                leaf.grad = None
            values = [t.clone() for t in function(*inputs)]
            results.append(values + [cast(Tensor, leaf.grad).clone() for leaf in leaves])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("backend", ["tape", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_number_as_temperature_can_be_captured(backend: Any) -> None:
    device = "cuda" if backend == "cuda" else "cpu"
    hidden, lm_head, targets = (t.detach().to(device) for t in example(torch.float32))
    graphed = capture(lambda h, t: logprobs_only(h, lm_head, t, 0.7), (hidden, targets), backend=backend)
    new_hidden = torch.randn_like(hidden)
    assert torch.equal(graphed(new_hidden, targets), logprobs_only(new_hidden, lm_head, targets, 0.7))
