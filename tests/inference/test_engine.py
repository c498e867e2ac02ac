"""The engine as its users see it: results, refusals, and requests that are independent of the rest of the batch."""

from __future__ import annotations

import math

import pytest
import torch

from rollgraph.errors import InvalidInput
from rollgraph.graph import GraphError
from rollgraph.inference import Engine, Output, Progress, RequestError, SamplingParams
from rollgraph.model import Decoder, token_logprobs
from rollgraph.tokenizer import ByteTokenizer
from tests.inference.tiny_engine import make_engine, make_model, tokens_of

MIXED = ["hello world", "x", "a longer prompt, which takes several chunks of prefill", [1, 2, 3, 4, 5], "hello world"]


def packed_logprobs(model: Decoder, output: Output, index: int = 0) -> torch.Tensor:
    """The log-probabilities of a completion's tokens in one packed forward."""
    tokens = torch.tensor(output.prompt_tokens + output.completions[index].tokens, device=model.norm.device)
    count = len(tokens)
    with torch.no_grad():
        hidden = model(
            tokens,
            torch.arange(count, device=tokens.device),
            torch.tensor([0, count], dtype=torch.int32, device=tokens.device),
            count,
        )
        logprobs = token_logprobs(hidden[:-1], model.head_weight, tokens[1:])
    assert isinstance(logprobs, torch.Tensor)
    return logprobs[len(output.prompt_tokens) - 1 :].cpu()


def test_logprobs_equal_those_of_one_packed_forward(engine: Engine, model: Decoder) -> None:
    outputs = engine.generate(MIXED, SamplingParams(n=3, max_tokens=30, seed=1))
    for output in outputs:
        assert len(output.completions) == 3
        for index, completion in enumerate(output.completions):
            ours = torch.tensor(completion.policy_logprobs)
            torch.testing.assert_close(ours, packed_logprobs(model, output, index), rtol=0, atol=1e-5)
            assert completion.logprobs == completion.policy_logprobs  # at temperature 1 they are the same
            stopped = completion.tokens[-1] == ByteTokenizer().eos_id
            assert completion.finish_reason == ("stop" if stopped else "length")
            assert stopped or len(completion.tokens) == 30


def test_logprobs_are_those_at_the_sampling_temperature(engine: Engine, model: Decoder) -> None:
    (output,) = engine.generate(["abc"], SamplingParams(max_tokens=20, temperature=0.5, seed=1))
    tokens = torch.tensor(output.prompt_tokens + output.completions[0].tokens, device=model.norm.device)
    positions = torch.arange(len(tokens), device=tokens.device)
    cu_seqlens = torch.tensor([0, len(tokens)], dtype=torch.int32, device=tokens.device)
    hidden = model(tokens, positions, cu_seqlens, len(tokens))
    expected = token_logprobs(hidden[:-1], model.head_weight, tokens[1:], 0.5)[len(output.prompt_tokens) - 1 :]
    torch.testing.assert_close(torch.tensor(output.completions[0].logprobs), expected.detach().cpu(), rtol=0, atol=2e-5)


def test_a_seeded_request_draws_the_same_in_any_batch(engine: Engine) -> None:
    params = SamplingParams(max_tokens=25, seed=7)
    (alone,) = engine.generate(["hello"], params)
    crowd = engine.generate(
        ["z" * 40, "hello", "q", "hello"], [SamplingParams(n=2, max_tokens=9), params, SamplingParams(top_k=5), params]
    )
    assert alone.completions[0].tokens == crowd[1].completions[0].tokens == crowd[3].completions[0].tokens
    samples = engine.generate(["hello"], SamplingParams(n=4, max_tokens=25, seed=7))[0].completions
    assert samples[0].tokens == alone.completions[0].tokens
    assert len({tuple(sample.tokens) for sample in samples}) == 4
    first, second = engine.generate(["hello", "hello"], SamplingParams(max_tokens=25))
    assert first.completions[0].tokens != second.completions[0].tokens  # without a seed


def test_preemption_in_a_small_cache_does_not_change_results(model: Decoder, engine: Engine) -> None:
    params = SamplingParams(n=2, max_tokens=30, seed=3)
    expected = engine.generate(MIXED, params)
    block = engine.plan.nbytes // engine.plan.blocks
    small = make_engine(model, cache_bytes=23 * block, filters=False)
    preempted = 0
    schedule = small._scheduler.schedule

    def count_preempted() -> object:
        nonlocal preempted
        step = schedule()
        preempted += len(step.preempted) if step is not None else 0
        return step

    small._scheduler.schedule = count_preempted  # type: ignore[method-assign,assignment]
    outputs = small.generate(MIXED, params)
    assert preempted > 0
    assert tokens_of(outputs) == tokens_of(expected)
    for output in outputs:
        for index, completion in enumerate(output.completions):
            torch.testing.assert_close(
                torch.tensor(completion.policy_logprobs), packed_logprobs(model, output, index), rtol=0, atol=1e-5
            )


def test_capturing_steps_on_demand_changes_no_sample(model: Decoder) -> None:
    params = [SamplingParams(n=2, max_tokens=9, seed=5), SamplingParams(max_tokens=30, seed=6, top_k=5)]
    engines = make_engine(model), make_engine(model)
    engines[1].capture(lambda *_: None)
    on_demand, ahead = (engine.generate(["z" * 40, "hello"], params) for engine in engines)
    assert tokens_of(on_demand) == tokens_of(ahead)
    for one, other in zip(on_demand, ahead, strict=True):
        assert [c.policy_logprobs for c in one.completions] == [c.policy_logprobs for c in other.completions]


def test_a_prompt_sampled_many_times_is_prefilled_once(engine: Engine) -> None:
    prefills = [graph for graph in engine.pool.graphs if graph.record.name.startswith("prefill")]
    before = sum(graph.record.replays for graph in prefills)
    engine.generate([list(range(16))], SamplingParams(n=4, max_tokens=5))  # 15 tokens fit one chunk
    assert sum(graph.record.replays for graph in prefills) == before + 1


def test_weights_changed_in_place_take_effect_at_once(device: str) -> None:
    model = make_model(device)
    engine = make_engine(model, filters=False)
    params = SamplingParams(max_tokens=10, temperature=0.0)
    before = engine.generate(["hello"], params)[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    after = engine.generate(["hello"], params)[0]
    assert after.completions[0].tokens != before.completions[0].tokens
    ours = torch.tensor(after.completions[0].policy_logprobs)
    torch.testing.assert_close(ours, packed_logprobs(model, after), rtol=0, atol=1e-5)
    assert all(graph.record.captures == 1 for graph in engine.pool.graphs)


def test_a_guard_stops_generation_from_stale_weights(device: str) -> None:
    current = [True]

    def guard() -> None:
        if not current[0]:
            raise GraphError("the weights are stale")

    engine = make_engine(make_model(device), filters=False, rows=1, guards=[guard])
    engine.generate(["a"], SamplingParams(max_tokens=2))
    current[0] = False
    with pytest.raises(GraphError, match="stale"):
        engine.generate(["abcdef"], SamplingParams(max_tokens=2))
    current[0] = True
    assert engine.generate(["abcdef"], SamplingParams(max_tokens=2))[0].completions[0].tokens  # the engine still works


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ("y" * 96, "leaves no room in max_length = 96"),
        ([1, 264], "token 264 is not in the model's vocabulary of 264"),
        ([1, -1], "token -1 is not in the model's vocabulary"),
        ([1.7, 2.9], "a prompt must be text or token ids, not '[1.7, 2.9]'"),
        (["a"], "a prompt must be text or token ids"),
        (None, "a prompt must be text or token ids, not 'None'"),
        ("a\ud83d b", "surrogate"),
    ],
)
def test_a_bad_prompt_is_refused_and_the_others_are_served(engine: Engine, prompt: object, message: str) -> None:
    params = SamplingParams(max_tokens=6, seed=2)
    first, bad, last = engine.generate(["one", prompt, "two"], params)  # type: ignore[list-item]
    assert bad.error is not None
    assert message in bad.error
    assert not bad.completions
    assert tokens_of([first, last]) == tokens_of(engine.generate(["one", "two"], params))
    with pytest.raises(RequestError):
        engine.submit(prompt, params)  # type: ignore[arg-type]


def test_a_prompt_may_leave_room_for_a_single_token(engine: Engine) -> None:
    (output,) = engine.generate(["y" * 95], SamplingParams(max_tokens=50, ignore_eos=True))
    assert len(output.completions[0].tokens) == 1
    assert output.completions[0].finish_reason == "length"


def test_a_request_too_large_for_the_cache_is_refused(model: Decoder, engine: Engine) -> None:
    block = engine.plan.nbytes // engine.plan.blocks
    small = make_engine(model, cache_bytes=6 * block, filters=False, rows=1)
    refused, served = small.generate(["0123456789", "ab"], SamplingParams(max_tokens=15, seed=1))
    assert refused.error == "a prompt of 10 tokens with 15 to generate needs 6 blocks; the cache has 5"
    assert len(served.completions[0].tokens) == 15
    with pytest.raises(ValueError, match="one block takes"):
        make_engine(model, cache_bytes=10)


def test_zero_max_tokens_finishes_at_once(engine: Engine) -> None:
    (output,) = engine.generate(["abc"], SamplingParams(n=2, max_tokens=0))
    assert [(c.tokens, c.text, c.finish_reason) for c in output.completions] == [([], "", "length")] * 2


def test_non_finite_logits_end_only_their_own_request(device: str) -> None:
    """Token 7 poisons every sequence that contains it. Other sequences reuse its blocks afterwards."""
    model = make_model(device)
    engine = make_engine(model, filters=False, cache_bytes=make_engine(model, filters=False, rows=1).plan.nbytes)
    params = SamplingParams(max_tokens=8, seed=4)
    expected = tokens_of(engine.generate(["fine", "well"], params))
    assert 7 not in [token for output in expected for sample in output for token in sample]
    with torch.no_grad():
        model.embed_tokens.weight[7] = math.nan
    for _ in range(3):
        first, poisoned, last = engine.generate(["fine", [1, 7, 2, 3], "well"], params)
        (completion,) = poisoned.completions
        assert (completion.finish_reason, completion.error) == ("error", "the model's logits are not finite")
        assert completion.tokens == []
        assert tokens_of([first, last]) == expected


def test_the_end_token_stops_unless_it_is_ignored(engine: Engine, device: str) -> None:
    eos = ByteTokenizer().eos_id
    assert eos is not None
    params = SamplingParams(n=4, max_tokens=80, seed=11, temperature=2.0)
    stopped = [c for o in engine.generate(MIXED, params) for c in o.completions if c.finish_reason == "stop"]
    assert stopped
    for completion in stopped:
        assert completion.tokens[-1] == eos
        assert eos not in completion.tokens[:-1]
    ignoring = SamplingParams(n=4, max_tokens=80, seed=11, temperature=2.0, ignore_eos=True)
    outputs = engine.generate(MIXED[:1], ignoring)
    assert {c.finish_reason for c in outputs[0].completions} == {"length"}


def test_abort_keeps_generated_tokens_and_frees_everything_else(engine: Engine) -> None:
    params = SamplingParams(n=2, max_tokens=40, seed=5, ignore_eos=True)
    kept, dropped = engine.submit("keep", params), engine.submit("drop", params)
    waiting = engine.submit("never started", params)
    for _ in range(12):
        engine.step()
    engine.abort(dropped)
    engine.abort(waiting)
    engine.abort(waiting)
    while engine.step():
        pass
    assert [c.finish_reason for c in dropped.completions] == ["abort"] * 2
    assert 0 < len(dropped.completions[0].tokens) < 40
    assert [c.tokens for c in waiting.completions] == [[], []]
    assert tokens_of([kept]) == tokens_of(engine.generate(["keep"], params))


def test_a_callback_can_abort_any_request(engine: Engine) -> None:
    outputs: list[Output] = []

    def stop_all(*_: object) -> None:
        if all(completion.tokens for output in outputs for completion in output.completions):
            for output in outputs:
                engine.abort(output)

    params = SamplingParams(n=2, max_tokens=40, ignore_eos=True)
    outputs += [engine.submit(p, params, on_token=stop_all) for p in ("ab", "cd")]
    while engine.step():
        pass
    assert {c.finish_reason for output in outputs for c in output.completions} == {"abort"}


def test_an_exception_from_a_callback_leaves_a_working_engine(engine: Engine) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the terminal is gone")

    params = SamplingParams(max_tokens=10, seed=6)
    expected = tokens_of(engine.generate(MIXED, params))
    for options in ({"on_token": fail}, {"on_progress": fail}):
        with pytest.raises(RuntimeError, match="terminal"):
            engine.generate(MIXED, params, **options)  # type: ignore[arg-type]
        assert tokens_of(engine.generate(MIXED, params)) == expected


def test_an_exception_in_a_step_aborts_all_requests(engine: Engine) -> None:
    """No completion is left unfinished, or with gaps in its tokens."""
    seen: list[int] = []

    def fail(_output: Output, _index: int, token: int, _text: str) -> None:
        seen.append(token)
        if len(seen) == 5:
            raise RuntimeError("the terminal is gone")

    params = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
    failing, bystander = engine.submit("hello", params, on_token=fail), engine.submit("world", params)
    engine.step()
    with pytest.raises(RuntimeError, match="terminal"):
        any(not engine.step() for _ in range(100))
    assert not engine.step()
    assert [output.completions[0].finish_reason for output in (failing, bystander)] == ["abort"] * 2
    assert failing.completions[0].tokens == seen
    uninterrupted = tokens_of(engine.generate(["world"], params))[0][0]
    assert bystander.completions[0].tokens == uninterrupted[: len(bystander.completions[0].tokens)]


def test_a_callback_cannot_call_generate(engine: Engine) -> None:
    params = SamplingParams(max_tokens=4, seed=3)
    with pytest.raises(RuntimeError, match="within a step"):
        engine.generate(["a"], params, on_token=lambda *_: engine.generate(["b"], params) and None)


def test_progress_ends_with_everything_finished(engine: Engine) -> None:
    reports: list[Progress] = []
    engine.generate(["a", "b", "c"], SamplingParams(max_tokens=5, ignore_eos=True), on_progress=reports.append)
    assert reports[-1] == Progress(tokens=15, running=0, waiting=0, finished=3)


def test_filtered_and_plain_requests_share_a_batch(engine: Engine) -> None:
    plain = SamplingParams(max_tokens=20, seed=8, ignore_eos=True)
    likeliest = SamplingParams(max_tokens=20, seed=8, top_k=1, ignore_eos=True)
    penalized = SamplingParams(max_tokens=20, temperature=0.0, repetition_penalty=1e6, ignore_eos=True)
    greedy = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    together = engine.generate(["abc"] * 4, [plain, likeliest, penalized, greedy])
    assert tokens_of(together[:1]) == tokens_of(engine.generate(["abc"], plain))
    assert tokens_of(together[1:2]) == tokens_of(together[3:])
    repeated = together[2].completions[0].tokens
    assert len(set(repeated)) == len(repeated)
    assert not set(repeated) & set(b"abc")


def test_an_engine_without_filters_refuses_them(model: Decoder) -> None:
    plain = make_engine(model, filters=False)
    refused, served = plain.generate(["a", "a"], [SamplingParams(top_p=0.5), SamplingParams(max_tokens=1)])
    assert refused.error is not None
    assert "without filters" in refused.error
    assert served.completions[0].tokens


@pytest.mark.parametrize(
    "options",
    [{"n": 0}, {"max_tokens": -1}, {"temperature": -0.1}, {"temperature": math.inf}, {"top_k": -1}, {"top_p": 0.0},
     {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 2.0}, {"repetition_penalty": 0.0}, {"stop": "abc"}, {"stop": ("",)},
     {"temperature": 1e-39}, {"temperature": math.nan}, {"temperature": 1e39}, {"temperature": "1"},
     {"temperature": None}, {"repetition_penalty": 1e-39}, {"repetition_penalty": 1e39}, {"n": 1.5}, {"n": True},
     {"max_tokens": 10.5}, {"max_tokens": None}, {"top_k": 1.5}, {"top_k": 2**31}, {"top_p": None}, {"min_p": "0"},
     {"stop": (5,)}, {"stop": None}, {"stop_ids": None}, {"stop_ids": 5}, {"stop_ids": ("a",)}, {"stop_ids": (-1,)},
     {"ignore_eos": 1}, {"seed": 1.5}, {"seed": "1"}],
    ids=str,
)  # fmt: skip
def test_invalid_parameters_are_named(options: dict[str, object]) -> None:
    (name,) = options
    with pytest.raises(InvalidInput, match=f"^{name}: must be .*, got ") as caught:
        SamplingParams(**options)  # type: ignore[arg-type]
    assert caught.value.argument == name


def test_parameters_at_their_limits() -> None:
    SamplingParams(max_tokens=0, temperature=0, top_k=2**31 - 1, top_p=1, min_p=1, repetition_penalty=1e6)
    SamplingParams(temperature=0.01, repetition_penalty=0.01, stop_ids=(0,), seed=-(2**70))
    SamplingParams(top_k=torch.tensor([3]).numpy()[0], top_p=torch.tensor([0.5]).numpy()[0])  # NumPy scalars


def test_without_a_tokenizer_prompts_must_be_token_ids(model: Decoder) -> None:
    engine = Engine(model, rows=1, max_length=32, block_size=4, prefill_tokens=16, filters=False)
    tokens, text, stop = engine.generate(
        [[1, 2], "ab", [3]], [SamplingParams(max_tokens=3), SamplingParams(), SamplingParams(stop=("x",))]
    )
    assert len(tokens.completions[0].tokens) == 3
    assert tokens.completions[0].text == ""
    assert text.error == "a text prompt needs a tokenizer"
    assert stop.error == "stop strings and streamed text need a tokenizer"
