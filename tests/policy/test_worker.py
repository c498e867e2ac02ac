"""One worker: it scores what it generates alike, trains as a plain loop does, and captures nothing on the way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgraph.distributed.world import World
from rollgraph.graph import CaptureError, GraphError
from rollgraph.inference import SamplingParams
from rollgraph.model import Decoder
from rollgraph.policy import PolicyWorker
from rollgraph.rl.losses import TokenStreams
from rollgraph.sharding.optimizer import Piece
from rollgraph.types import Batch, Prompt, Rollout, Sample
from tests.policy.small_worker import (
    ALGORITHM,
    ALONE,
    DECAY,
    LIMITS,
    RATE,
    TINY,
    assert_equal_up_to_rounding,
    gradient,
    make_batch,
    make_model,
    make_samples,
    make_worker,
    parameters,
    reset,
    sample_rollouts,
)


class Breakable:
    """GRPO's loss until it is told to fail. It runs in Python only if it is not part of a graph."""

    def __init__(self) -> None:
        self.calls_left: float = math.inf

    def __call__(self, streams: TokenStreams) -> tuple[Tensor, dict[str, Tensor]]:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise ArithmeticError("the loss failed")
        return ALGORITHM.loss(streams)


BREAKABLE = {"eager": Breakable(), "layer": Breakable()}
MAKERS: dict[str, Callable[[], PolicyWorker]] = {
    "graph": lambda: make_worker(),
    "eager": lambda: make_worker(backend="eager", loss=BREAKABLE["eager"]),
    "layer": lambda: make_worker(scopes=("layer",), loss=BREAKABLE["layer"]),
}


@pytest.fixture(scope="module")
def workers() -> Iterator[dict[str, PolicyWorker]]:
    made: dict[str, PolicyWorker] = {}
    yield made
    for worker in made.values():
        worker.close()


@pytest.fixture
def get(workers: dict[str, PolicyWorker]) -> Iterator[Callable[[str], PolicyWorker]]:
    """Get a worker by name, in its initial state; after the test, check that it is idle and has captured nothing."""
    asked: dict[str, tuple[PolicyWorker, int]] = {}

    def get(name: str) -> PolicyWorker:
        worker = workers[name] = workers.get(name) or MAKERS[name]()
        reset(worker)
        asked[name] = (worker, worker.pool.report().captures)
        return worker

    yield get
    for name, (worker, captures) in asked.items():
        report = worker.pool.report()
        assert report.captures == captures
        assert report.eager_runs == 0 or name == "eager"
        assert worker.phases.current == "idle"
        assert worker.weights.current == "policy"
        assert all(not shard.any() for shard in worker.sharded.gradient_shards())
        assert all(parameter.grad is None for parameter in worker.model.parameters())


@pytest.fixture
def worker(get: Callable[[str], PolicyWorker]) -> PolicyWorker:
    return get("graph")


def bare(rollout: Rollout) -> Sample:
    zeros = [0.0] * len(rollout.tokens)
    return Sample(rollout.prompt.tokens, rollout.tokens, zeros, zeros, zeros)


def flat(values: list[list[float]]) -> Tensor:
    return torch.tensor([value for row in values for value in row])


def recorded(rollouts: list[Rollout]) -> Tensor:
    return flat([rollout.logprobs for rollout in rollouts])


# -- generate and score ----------------------------------------------------------------------------


def test_scoring_gives_the_log_probabilities_of_the_rollout(worker: PolicyWorker) -> None:
    rollouts = sample_rollouts(worker, 7, "a")
    scored = flat(worker.logprobs([bare(rollout) for rollout in rollouts]))
    torch.testing.assert_close(scored, recorded(rollouts), rtol=0, atol=1e-5)
    assert scored.std() > 0.5  # they differ, so an entry in the wrong place would show


def test_scoring_uses_the_sampling_temperature() -> None:
    cool = make_worker(scopes=("mlp",), temperature=0.7, reference=False)
    rollouts = sample_rollouts(cool, 7, "a")
    scored = flat(cool.logprobs([bare(rollout) for rollout in rollouts]))
    torch.testing.assert_close(scored, recorded(rollouts), rtol=0, atol=1e-5)
    found = cool.train(ALGORITHM.make_batch(rollouts))
    assert found["token_mult_prob_error_max"] < 1 + 1e-5
    assert abs(found["ratio"] - 1) < 1e-5
    cool.close()


def test_a_sample_depends_on_its_seed_and_key_alone(worker: PolicyWorker) -> None:
    prompts = [[1, 2], [3], [4, 5, 6], [1, 2], [7, 8]]
    requests = list(zip(prompts, count(10)))
    crowd = [turn.tokens for turn in worker.generate(requests, seed="s")]
    backwards = [turn.tokens for turn in worker.generate(requests[::-1], seed="s")]
    assert backwards[::-1] == crowd
    for request, tokens in zip(requests, crowd, strict=True):
        assert worker.generate([request], seed="s")[0].tokens == tokens
    assert crowd[0] != crowd[3]  # same prompt, other key
    assert worker.generate(requests[:1], seed="t")[0].tokens != crowd[0]
    assert worker.generate([], seed="s") == []


def test_a_completion_ends_at_the_maximum_length(worker: PolicyWorker) -> None:
    (turn,) = worker.generate([([1] * 37, 0)], seed="s", params=SamplingParams(max_tokens=12))
    assert (len(turn.tokens), turn.finish_reason) == (3, "length")
    short, full = worker.generate([([1], 0), ([1] * 40, 1)], seed="s")
    assert (len(short.tokens), full.tokens, full.finish_reason) == (12, [], "length")
    with pytest.raises(ValueError, match="token 40 is not in the model's vocabulary"):
        worker.generate([([1], 0), ([40], 1)], seed="s")
    assert worker.generate([([1], 0)], seed="s") == [short]


def test_tokens_that_were_not_sampled_get_no_reference_log_probability(worker: PolicyWorker) -> None:
    (rollout,) = sample_rollouts(worker, 1, "a")
    rollout.sampled = [index % 2 == 0 for index in range(len(rollout.tokens))]
    worker.score([rollout])
    (all_of_them,) = worker.logprobs([bare(rollout)], "reference")
    assert rollout.reference_logprobs is not None
    assert rollout.reference_logprobs[0::2] == all_of_them[0::2]
    assert set(rollout.reference_logprobs[1::2]) == {0.0}


def test_the_reference_policy_stays_while_the_policy_learns(
    worker: PolicyWorker, get: Callable[..., PolicyWorker]
) -> None:
    """Scoring between steps gives the reference's log-probabilities and does not change what is trained."""
    samples = make_samples(6, seed=5)
    in_the_beginning = worker.logprobs(samples)
    for step in range(3):
        worker.train(make_batch(1, 4, step))
        assert worker.logprobs(samples, "reference") == in_the_beginning
        policy = worker.logprobs(samples)
        assert (flat(policy) - flat(in_the_beginning)).abs().max() > 1e-3
    trained = parameters(worker)
    reset(worker)
    for step in range(3):
        worker.train(make_batch(1, 4, step))
    assert torch.equal(parameters(worker), trained)


def test_generation_uses_the_trained_weights_at_once(worker: PolicyWorker) -> None:
    before = sample_rollouts(worker, 5, "a")
    for step in range(3):
        worker.train(make_batch(2, 4, step))
    after = sample_rollouts(worker, 5, "a")
    assert [r.tokens for r in after] != [r.tokens for r in before]
    scored = flat(worker.logprobs([bare(rollout) for rollout in after]))
    torch.testing.assert_close(scored, recorded(after), rtol=0, atol=1e-5)
    with worker.weights.use("reference"):  # and it uses the weights of the current slot
        assert [r.tokens for r in sample_rollouts(worker, 5, "a")] == [r.tokens for r in before]


# -- train -----------------------------------------------------------------------------------------


def plain_loss(model: Decoder, sample: Sample) -> Tensor:
    """The GRPO loss of one sample, written out, in the precision of the model."""
    whole = torch.tensor([*sample.prompt, *sample.tokens])
    length = len(whole)
    hidden = model(whole, torch.arange(length), torch.tensor([0, length], dtype=torch.int32), length)
    all_logprobs = (hidden[:-1] @ model.head_weight.t()).log_softmax(-1)
    logprobs = all_logprobs[torch.arange(length - 1), whole[1:]][len(sample.prompt) - 1 :]
    advantages, weights = torch.tensor(sample.advantages), torch.tensor(sample.weights)
    ratio = (logprobs - torch.tensor(sample.logprobs)).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    r = torch.tensor(sample.reference_logprobs) - logprobs
    return (weights * (-gain + 0.04 * (r.exp() - r - 1))).sum()


def plain_gradient(weights: dict[str, Tensor], batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The loss and its gradient at the given weights, computed sample by sample and returned in float64."""
    model = make_model().to(dtype)
    model.load_state_dict(weights)
    loss = torch.stack([plain_loss(model, sample) for sample in batch.samples]).sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.detach().double(), torch.cat([gradient.flatten() for gradient in gradients]).double()


def in_order(worker: PolicyWorker, values: Callable[[Piece], Tensor]) -> Tensor:
    """Something that the optimizer has for each element, in the order of `parameters()`, in float64."""
    by_name = {piece.parameter.name: values(piece).detach().double().flatten() for piece in worker.optimizer.pieces}
    return torch.cat([by_name[name] for name, _ in worker.model.named_parameters()])


def moments(worker: PolicyWorker) -> list[Tensor]:
    return [in_order(worker, lambda piece, name=name: piece.state[name]) for name in ("exp_avg", "exp_avg_sq")]


def largest(values: Tensor) -> float:
    return float(values.abs().max())


@pytest.mark.parametrize("prompts", [None, 2], ids=["prompts of their own", "shared prompts"])
def test_training_equals_a_plain_loop(worker: PolicyWorker, prompts: int | None) -> None:
    """Compare each call, starting from the worker's current state, with the same step written out in float64.

    Adam divides a gradient by its own magnitude, so where the gradient is nothing but rounding, weights that were
    trained twice may differ by up to the learning rate. A single step can be compared: the gradient is as close to
    float64 as that of a plain loop in fp32, and the rest is one formula for each element.
    """
    matrices = in_order(worker, lambda piece: torch.full_like(piece.master, len(piece.parameter.shape) >= 2))
    fp32 = torch.finfo(torch.float32).eps
    for call in range(4):
        batch = make_batch(1, 5 + call, call)
        if prompts is not None:
            for index, sample in enumerate(batch.samples):
                sample.prompt = [3 + index % prompts, *range(call, call + 6)]
        before = {name: tensor.clone() for name, tensor in worker.model.state_dict().items()}
        weights = parameters(worker).double()
        first, second = (moment.clone() for moment in moments(worker))
        found = worker.train(batch)

        loss, gradient = plain_gradient(before, batch, torch.float64)
        rounded_loss, rounded = plain_gradient(before, batch, torch.float32)
        norm = gradient.norm()
        noise = 8 * max(largest(rounded - gradient), fp32 * largest(gradient))
        assert noise < 1e-4 * largest(gradient)  # otherwise the comparison would be meaningless
        loss_noise = 8 * max(largest(rounded_loss - loss), fp32)  # it is a sum of terms that add up to about one
        assert found["loss"] == pytest.approx(float(loss), rel=0, abs=loss_noise)
        assert found["grad_norm"] == pytest.approx(float(norm), rel=0, abs=noise * math.sqrt(len(gradient)))

        clipped = gradient * min(1.0, 1.0 / (float(norm) + 1e-6))
        expected = 0.9 * first + 0.1 * clipped, 0.999 * second + 0.001 * clipped.square()
        first, second = moments(worker)
        torch.testing.assert_close(first, expected[0], rtol=0, atol=0.1 * noise + fp32)
        torch.testing.assert_close(second, expected[1], rtol=8 * fp32, atol=0.002 * noise)

        steps = call + 1
        update = (first / (1 - 0.9**steps)) / ((second / (1 - 0.999**steps)).sqrt() + 1e-8)
        stepped = weights * (1 - RATE * DECAY * matrices) - RATE * update
        sizes = weights.abs() + RATE * update.abs()
        assert bool(((parameters(worker) - stepped).abs() <= 8 * fp32 * sizes).all())
        assert largest(stepped - weights) > 0.3 * RATE


def test_graphs_and_eager_execution_give_the_same_bits(worker: PolicyWorker, get: Callable[..., PolicyWorker]) -> None:
    eager = get("eager")
    for call in range(3):
        batch = make_batch(2, 6, call)
        assert worker.train(batch, epochs=2, score_old=True) == eager.train(batch, epochs=2, score_old=True)
        assert torch.equal(parameters(worker), parameters(eager))
    left, right = sample_rollouts(worker, 5, "a"), sample_rollouts(eager, 5, "a")
    assert left == right


@pytest.mark.parametrize("name", ["graph", "layer"])
def test_many_calls_equal_one_with_many_minibatches(get: Callable[..., PolicyWorker], name: str) -> None:
    worker = get(name)
    batch = make_batch(4, 5)
    apart = [worker.train(Batch([minibatch])) for minibatch in batch.minibatches]
    one_by_one = parameters(worker)
    reset(worker)
    together = worker.train(batch)
    assert torch.equal(parameters(worker), one_by_one)
    for metric in ("loss", "grad_norm", "weight"):  # the mean over minibatches
        assert together[metric] == pytest.approx(sum(found[metric] for found in apart) / 4, rel=1e-6)
    assert together["train_tokens"] == sum(found["train_tokens"] for found in apart)
    reset(worker)
    for _ in range(2):
        for minibatch in batch.minibatches:
            worker.train(Batch([minibatch]))
    twice = parameters(worker)
    reset(worker)
    worker.train(batch, epochs=2)
    assert torch.equal(parameters(worker), twice)


@pytest.mark.parametrize("scopes", [("layer",), ("attn",), ("mlp",), ("attn", "mlp")], ids="+".join)
def test_smaller_graphs_give_the_same_bits(worker: PolicyWorker, scopes: tuple[str, ...]) -> None:
    """With one token bucket all of them sum in the same order."""
    other = make_worker(scopes=scopes)
    batches = [Batch([make_samples(5, call, lengths=[14, 9, 15, 11, 15])]) for call in range(3)]  # 84 tokens
    for batch in batches:
        assert worker.train(batch) == other.train(batch)
        assert torch.equal(parameters(worker), parameters(other))
    assert sample_rollouts(worker, 3, "a") == sample_rollouts(other, 3, "a")
    report = other.pool.report()
    assert report.eager_runs == 0
    units = [graph for graph in report.graphs if graph.backward_replays]
    assert len(units) == 2 * len(scopes)
    assert all(graph.replays == graph.backward_replays == 3 for graph in units)
    other.close()


def test_graphs_of_layers_train_like_a_graph_of_the_step(get: Callable[..., PolicyWorker]) -> None:
    step, layer = get("graph"), get("layer")
    for call in range(3):
        batch = make_batch(1, 9, call)
        reset(step)
        reset(layer)
        one, other = step.train(batch, score_old=True), layer.train(batch, score_old=True)
        for name in one.keys() - {"padding"}:
            assert one[name] == pytest.approx(other[name], abs=1e-6)
        assert_equal_up_to_rounding(gradient(step), gradient(layer))


def test_the_gradient_does_not_depend_on_the_microbatches() -> None:
    samples = make_samples(12, seed=3)
    found = []
    for buckets in ((24,), (48, 96), (256,)):
        limits = replace(LIMITS, max_length=24, token_buckets=buckets, tokens_per_sequence=4)
        worker = make_worker(backend="eager", limits=limits)
        metrics = worker.train(Batch([samples]))
        runs = sum(g.eager_runs.total() for g in worker.pool.report().graphs if g.name.startswith("train"))
        found.append((runs, metrics["loss"], gradient(worker)))
        worker.close()
    (many, loss, gradients), *others = found
    assert [many > 4, others[0][0] > 1, others[1][0] == 1] == [True] * 3
    for _, other_loss, other_gradients in others:
        assert other_loss == pytest.approx(loss, abs=1e-6)
        assert_equal_up_to_rounding(other_gradients, gradients)


@pytest.mark.parametrize("name", ["graph", "eager", "layer"])
def test_before_any_update_the_ratio_is_one_and_the_kl_is_zero(get: Callable[..., PolicyWorker], name: str) -> None:
    worker = get(name)
    rollouts = sample_rollouts(worker, 9, "a")
    worker.score(rollouts)
    found = worker.train(ALGORITHM.make_batch(rollouts), score_old=True)
    assert found["ratio"] == 1.0
    assert found["kl"] == 0.0
    assert found["clipped_low"] == found["clipped_high"] == 0.0
    assert abs(found["loss"]) < 1e-6  # the advantages of a group add up to zero
    assert found["grad_norm"] > 0.01
    assert found["token_mult_prob_error_max"] < 1 + 1e-5


def test_the_ratio_stays_one_with_a_learning_rate_of_zero(worker: PolicyWorker) -> None:
    reset(worker, rate=0.0)
    before = parameters(worker)
    batch = make_batch(3, 5)
    found = worker.train(batch, epochs=2, score_old=True)
    assert torch.equal(parameters(worker), before)
    assert found["ratio"] == 1.0
    assert worker.train(batch)["ratio"] == 1.0  # the samples keep their old log-probabilities


def test_hundreds_of_steps_capture_nothing_and_leave_no_hook(worker: PolicyWorker) -> None:
    report = worker.pool.report()
    hooked = worker.sharded.hooks.modules
    addresses = [parameter.data_ptr() for parameter in worker.model.parameters()]
    for step in range(300):
        rollouts = sample_rollouts(worker, 4, str(step), max_tokens=2)
        worker.score(rollouts)
        found = worker.train(ALGORITHM.make_batch(rollouts, minibatches=1 + step % 2, seed=step))
        assert found["token_mult_prob_error_max"] < 1 + 1e-4
    later = worker.pool.report()
    assert later.captures == report.captures
    assert later.eager_runs == 0
    assert later.pool_bytes == report.pool_bytes
    assert sum(g.replays for g in later.graphs if g.name.startswith("train")) >= 450
    assert worker.sharded.hooks.modules == hooked
    assert [parameter.data_ptr() for parameter in worker.model.parameters()] == addresses
    assert found["skipped_steps"] == 0


@pytest.mark.parametrize(
    "options", [{}, {"scopes": ("layer",)}, {"backend": "eager", "scopes": ("attn", "mlp")}], ids=str
)
def test_close_restores_the_model(options: dict[str, Any]) -> None:
    worker = make_worker(**options)
    worker.train(make_batch(1, 3))
    worker.close()
    worker.close()
    model = worker.model
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert not module._backward_hooks
        assert "forward" not in vars(module)
    assert not model._state_dict_pre_hooks
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert not worker.pool.report().graphs
    torch.stack([plain_loss(model, sample) for sample in make_samples(2)]).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())  # autograd keeps them again


# -- failures --------------------------------------------------------------------------------------


def trained_once(worker: PolicyWorker, batch: Batch) -> Tensor:
    reset(worker)
    worker.train(batch)
    return parameters(worker)


@pytest.mark.parametrize("name", ["eager", "layer"])
@pytest.mark.parametrize("calls", [0, 1, 3])
def test_a_failing_loss_does_not_affect_the_weights_or_the_next_step(
    get: Callable[..., PolicyWorker], name: str, calls: int
) -> None:
    worker, loss = get(name), BREAKABLE[name]
    batch = Batch([make_samples(6, seed, lengths=[35] * 6) for seed in range(2)])  # three microbatches each
    wanted = trained_once(worker, batch)
    reset(worker)
    worker.train(Batch(batch.minibatches[:1]))
    after_one = parameters(worker)
    reset(worker)
    before = parameters(worker)
    loss.calls_left = calls
    with pytest.raises(ArithmeticError, match="the loss failed"):
        worker.train(batch)
    loss.calls_left = math.inf
    assert torch.equal(parameters(worker), after_one if calls == 3 else before)  # a whole minibatch or nothing
    assert torch.equal(trained_once(worker, batch), wanted)


@pytest.mark.parametrize("name", ["layer", "eager"])
def test_a_backward_that_fails_at_the_end_leaves_no_gradient(get: Callable[..., PolicyWorker], name: str) -> None:
    """Backward reaches the embedding last, when the gradients of all layers exist."""
    worker = get(name)
    batch = make_batch(1, 9)
    wanted = trained_once(worker, batch)
    reset(worker)
    before = parameters(worker)

    def fail(_: Tensor) -> None:
        raise ArithmeticError("the backward failed")

    handle = worker.model.embed.weight.register_hook(fail)
    for _ in range(3):
        with pytest.raises(ArithmeticError, match="the backward failed"):
            worker.train(batch)
        assert torch.equal(parameters(worker), before)
    handle.remove()
    worker.train(batch)
    assert torch.equal(parameters(worker), wanted)


@pytest.mark.parametrize("name", ["graph", "eager", "layer"])
def test_a_step_with_a_nan_gradient_is_skipped_and_counted(get: Callable[..., PolicyWorker], name: str) -> None:
    worker = get(name)
    good, bad = make_batch(1, 5), make_batch(1, 5, seed=1)
    wanted = trained_once(worker, good)
    bad.samples[2].advantages = [math.nan] * len(bad.samples[2].tokens)
    reset(worker)
    before = parameters(worker)
    found = worker.train(bad)
    assert found["skipped_steps"] == 1
    assert math.isnan(found["grad_norm"])
    assert torch.equal(parameters(worker), before)
    found = worker.train(good)
    assert found["skipped_steps"] == 1
    assert torch.equal(parameters(worker), wanted)  # the moments have not changed either


@pytest.mark.parametrize("name", ["graph", "eager", "layer"])
def test_another_slot_cannot_be_trained(get: Callable[..., PolicyWorker], name: str) -> None:
    worker = get(name)
    batch = make_batch(1, 5)
    wanted = trained_once(worker, batch)
    trained_once(worker, make_batch(1, 5, seed=1))  # so that the policy differs from the reference
    before = parameters(worker)
    with worker.weights.use("reference"):
        inside = parameters(worker)
        assert not torch.equal(inside, before)
        with pytest.raises(GraphError, match="the weights in the model are 'reference'"):
            worker.train(batch)
        assert torch.equal(parameters(worker), inside)
    assert torch.equal(parameters(worker), before)
    assert torch.equal(trained_once(worker, batch), wanted)


def test_phases_cannot_be_nested(worker: PolicyWorker) -> None:
    batch, before = make_batch(1, 4), parameters(worker)
    with worker.phases.enter("train"):
        with pytest.raises(RuntimeError, match="cannot generate during train"):
            worker.generate([([1], 0)], seed="s")
        with pytest.raises(RuntimeError, match="cannot score during train"):
            worker.train(batch, score_old=True)
    with worker.phases.enter("score"):
        worker.logprobs(batch.samples)
        with pytest.raises(RuntimeError, match="cannot train during score"):
            worker.train(batch)
        assert not worker.sharded.hooks.modules
    assert worker.sharded.hooks.modules
    assert torch.equal(parameters(worker), before)


def test_a_reference_that_was_saved_after_the_capture_is_refused() -> None:
    """The captured loss has no KL term, so training on samples with a reference would silently ignore it."""
    worker = make_worker(backend="eager", reference=False)
    rollout = Rollout(Prompt(0, (1, 2), ""), [3, 4], [True] * 2, [-3.0] * 2, reward=1.0)
    assert "kl" not in worker.train(ALGORITHM.make_batch([rollout]))
    worker.weights.save("reference")
    worker.score([rollout])
    with pytest.raises(ValueError, match=r"save\(\) it before capture_all"):
        worker.train(ALGORITHM.make_batch([rollout]))
    worker.close()


def test_samples_that_do_not_fit_are_refused(worker: PolicyWorker) -> None:
    before = parameters(worker)
    with pytest.raises(ValueError, match="41 tokens is longer than the 40"):
        worker.train(Batch([make_samples(2, lengths=[5, 37])]))
    with pytest.raises(ValueError, match="104 tokens does not fit a microbatch of 96"):
        worker.train(Batch([make_samples(2, lengths=[5, 100])]))
    assert torch.equal(parameters(worker), before)


@pytest.mark.parametrize("minibatches", [[], [[]], [make_samples(2), []]], ids=["no minibatch", "no sample", "one"])
def test_an_empty_batch_is_refused(worker: PolicyWorker, minibatches: list[list[Sample]]) -> None:
    before = parameters(worker)
    with pytest.raises(ValueError, match="nothing to train on"):
        worker.train(Batch(minibatches))
    assert torch.equal(parameters(worker), before)
    assert worker.optimizer.steps == 0


def test_a_loss_that_cannot_be_captured_changes_nothing() -> None:
    def reads_a_value(streams: TokenStreams) -> tuple[Tensor, dict[str, Tensor]]:
        return ALGORITHM.loss(replace(streams, weights=streams.weights * streams.logprobs.sum().item()))

    sampling = SamplingParams(max_tokens=12)
    worker = PolicyWorker(make_model(), None, ALONE, LIMITS, sampling=sampling, optimizer={"lr": RATE}, warmup=1)
    before = parameters(worker)
    with pytest.raises(CaptureError, match="item"):
        worker.capture_all({"policy": (reads_a_value, False)})
    assert worker.phases.current == "idle"
    assert torch.equal(parameters(worker), before)
    assert all(not shard.any() for shard in worker.sharded.gradient_shards())
    worker.close()
    assert not any(module._forward_pre_hooks for module in worker.model.modules())


def test_scopes_that_cannot_work_are_refused() -> None:
    settings: dict[str, Any] = {"sampling": SamplingParams(), "optimizer": {"lr": RATE}}
    with pytest.raises(ValueError, match="communication of several ranks: use scope layer"):
        PolicyWorker(make_model(), None, World(0, 2, "cpu"), LIMITS, **settings)
    with pytest.raises(ValueError, match="checkpointing calls a layer twice"):
        PolicyWorker(Decoder(TINY, checkpointing=True), None, ALONE, LIMITS, scopes=("layer",), **settings)


def test_whole_logits_and_chunks_give_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollgraph.model.logprobs.CHUNK_ELEMENTS", 7 * TINY.vocabulary)
    after = []
    for whole in (True, False):
        worker = make_worker(limits=replace(LIMITS, whole_logits=whole))
        worker.train(make_batch(minibatches=1, each=6))
        after.append(gradient(worker))
        worker.close()
    assert_equal_up_to_rounding(*after)
