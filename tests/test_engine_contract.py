"""One suite for all engines: whoever feeds an engine relies on exactly this."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from bulkgen.engine import Engine, EngineSettings, open_engine
from bulkgen.engine.demo_model import prepare_demo_model
from bulkgen.engine.devices import divide
from bulkgen.errors import EngineError
from bulkgen.records import Completion, Failure, Request
from bulkgen.spec import fits

# vLLM and torch warn of each other's deprecations while an engine loads.
pytestmark = pytest.mark.filterwarnings("ignore")


def settings(kind: str, **stub: Any) -> EngineSettings:
    if kind == "stub":
        return EngineSettings(
            kind="stub", model="stub", args={"max_num_seqs": 8, "max_model_len": 512}, stub={"step_s": 0.0005, **stub}
        )
    share = divide(1, {})[0]
    own = {"max_model_len": 512, "max_num_seqs": 8, "enforce_eager": True}
    return EngineSettings(kind="vllm", model=str(prepare_demo_model(print)), args={**own, **share.args})


@pytest.fixture(scope="module", params=["stub", pytest.param("vllm", marks=pytest.mark.real)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    chosen = settings(request.param)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**divide(1, {})[0].env, "VLLM_CPU_KVCACHE_SPACE": "1"}.items():
            patch.setenv(name, value)
        engine = open_engine(chosen)
        yield engine
        engine.close()
        engine.close()


def drain(engine: Engine, requests: list[Request]) -> dict[int, Completion | Failure]:
    """Submit all, poll to the end; each request must come back exactly once."""
    engine.submit(requests)
    results: dict[int, Completion | Failure] = {}
    for _ in range(20_000):
        for result in engine.poll():
            assert result.index not in results
            results[result.index] = result
        if len(results) == len(requests):
            break
    assert set(results) == {r.index for r in requests}
    assert engine.poll() == []
    return results


def requests(number: int, **sampling: Any) -> list[Request]:
    return [
        Request(i, list(range(100 + i, 110 + 3 * i)), {"temperature": 0, "max_tokens": 1 + i % 7, **sampling})
        for i in range(number)
    ]


def test_each_request_comes_back_once_with_its_own_counts(engine: Engine) -> None:
    sent = requests(20)
    for index, result in drain(engine, sent).items():
        assert isinstance(result, Completion)
        assert result.prompt_tokens == len(sent[index].tokens)
        assert 1 <= result.output_tokens <= sent[index].sampling["max_tokens"]
        assert result.finish_reason in ("stop", "length")
        assert 0 <= result.queued_s <= result.ttft_s <= result.e2e_s
        assert (result.tpot_s is None) == (result.output_tokens == 1)


def test_the_engine_counts_what_the_rows_sum_up_to(engine: Engine) -> None:
    before = engine.stats()
    results = [r for r in drain(engine, requests(12)).values() if isinstance(r, Completion)]
    after = engine.stats()
    assert after.prompt_tokens - before.prompt_tokens == sum(r.prompt_tokens for r in results)
    assert after.output_tokens - before.output_tokens == sum(r.output_tokens for r in results)
    assert after.cached_tokens - before.cached_tokens == sum(r.cached_tokens for r in results)


def test_submitting_never_waits_and_shows_as_running_or_waiting(engine: Engine) -> None:
    engine.submit(requests(20, max_tokens=30, ignore_eos=True))
    finished = len(engine.poll())
    stats = engine.stats()
    assert 0 < stats.running <= engine.limits.max_num_seqs
    assert stats.running + stats.waiting + finished >= 20
    for _ in range(10_000):
        finished += len(engine.poll())
    assert finished == 20
    assert engine.stats().waiting == 0


def test_a_request_that_cannot_be_is_a_failure_and_hurts_no_other(engine: Engine) -> None:
    good = requests(4)
    bad = Request(99, [1] * 600 if _is_vllm(engine) else [1] * 2_000_000, {"temperature": 0, "max_tokens": 5})
    results = drain(engine, [*good[:2], bad, *good[2:]])
    assert isinstance(results.pop(99), Failure)
    assert all(isinstance(r, Completion) for r in results.values())


def test_the_same_request_gives_the_same_answer_at_temperature_zero(engine: Engine) -> None:
    sent = requests(3)
    first, second = drain(engine, sent), drain(engine, sent)
    assert [_text(first[i]) for i in range(3)] == [_text(second[i]) for i in range(3)]


def test_what_is_cancelled_never_comes_back_and_leaves_room(engine: Engine) -> None:
    sent = requests(6, max_tokens=5, ignore_eos=True, temperature=1)
    sent = [replace(r, sampling={**r.sampling, "n": 1 + r.index % 3}) for r in sent]
    engine.submit(sent)
    came = {result.index for result in engine.poll()}
    engine.cancel([r.index for r in sent if r.index % 2 == 0])
    engine.cancel([0, 999])
    for _ in range(10_000):
        new = [result.index for result in engine.poll()]
        assert not [index for index in new if index in came or index % 2 == 0]
        came.update(new)
    assert {index for index in came if index % 2} == {r.index for r in sent if r.index % 2}
    assert (engine.stats().waiting, engine.poll()) == (0, [])
    # The same names once more, as a row that is tried again.
    assert all(isinstance(r, Completion) for r in drain(engine, sent).values())


# ---- several answers, log probabilities ----


def test_several_answers_come_back_together_in_their_order(engine: Engine) -> None:
    sent = [
        replace(r, sampling={**r.sampling, "n": n, "seed": 7 * r.index})
        for r, n in zip(requests(6, temperature=1, max_tokens=6, ignore_eos=True), (1, 2, 3) * 2, strict=True)
    ]
    before = engine.stats()
    results = drain(engine, sent)
    after = engine.stats()
    for request in sent:
        result = results[request.index]
        assert isinstance(result, Completion)
        n = request.sampling["n"]
        assert [sample.index for sample in result.samples] == list(range(n))
        assert (result.text, result.finish_reason) == (result.samples[0].text, result.samples[0].finish_reason)
        assert result.output_tokens == sum(sample.output_tokens for sample in result.samples)
        assert result.prompt_tokens == len(request.tokens)
        assert len({sample.text for sample in result.samples}) == n
    both = [(r, results[r.index]) for r in sent]
    output = sum(c.output_tokens for _, c in both if isinstance(c, Completion))
    assert after.output_tokens - before.output_tokens == output
    assert after.prompt_tokens - before.prompt_tokens == sum(len(r.tokens) * r.sampling["n"] for r in sent)


def test_no_number_of_answers_means_one_and_no_samples(engine: Engine) -> None:
    (result,) = drain(engine, requests(1)).values()
    assert isinstance(result, Completion)
    assert (result.samples, result.logprobs) == ((), None)


@pytest.mark.parametrize("seed", [-2, 2**63 - 1, -(2**63)])
def test_any_seed_serves_several_answers(engine: Engine, seed: int) -> None:
    sent = requests(2, temperature=1, max_tokens=4, n=3, seed=seed, ignore_eos=True)
    first, second = drain(engine, sent), drain(engine, sent)
    for index in (0, 1):
        one, other = first[index], second[index]
        assert isinstance(one, Completion)
        assert isinstance(other, Completion)
        assert len({sample.text for sample in one.samples}) == 3
        assert [s.output_tokens for s in one.samples] == [s.output_tokens for s in other.samples]


@pytest.mark.parametrize("top", [0, 3])
def test_log_probabilities_are_of_each_token(engine: Engine, top: int) -> None:
    sent = requests(2, temperature=1, max_tokens=4, logprobs=top, ignore_eos=True)
    sent = [replace(r, sampling={**r.sampling, **({"n": 2} if r.index % 2 else {})}) for r in sent]
    for request in sent:
        result = drain(engine, [request])[request.index]
        assert isinstance(result, Completion)
        answers = [(s.output_tokens, s.logprobs) for s in result.samples] or [(result.output_tokens, result.logprobs)]
        for tokens, logprobs in answers:
            assert logprobs is not None
            assert len(logprobs.tokens) == len(logprobs.token_ids) == len(logprobs.logprobs) == tokens
            assert list(logprobs.top_counts) == [top] * tokens
            assert len(logprobs.top_tokens) == len(logprobs.top_token_ids) == len(logprobs.top_logprobs) == top * tokens
            assert all(value <= 0 for value in (*logprobs.logprobs, *logprobs.top_logprobs))
            for i in range(tokens if top else 0):
                likeliest = list(logprobs.top_logprobs[i * top : i * top + top])
                assert likeliest == sorted(likeliest, reverse=True)
        assert result.logprobs == (result.samples[0].logprobs if result.samples else result.logprobs)


# ---- answers of a form ----

SCHEMA = '{"type":"object","properties":{"a":{"enum":[1,2]}},"required":["a"],"additionalProperties":false}'
FORMS: list[dict[str, Any]] = [{"json_schema": SCHEMA}, {"choice": ["yes", "no"]}, {"json_object": True}]


def test_answers_have_the_form_that_each_asks_for(engine: Engine) -> None:
    plain = requests(len(FORMS), max_tokens=40)
    sent = [replace(r, sampling={**r.sampling, "structured_outputs": FORMS[r.index]}) for r in plain]
    sent.append(Request(50, plain[0].tokens, {**sent[0].sampling, "temperature": 1, "n": 2, "logprobs": 2}))
    results = drain(engine, [*sent, Request(51, plain[0].tokens, plain[0].sampling)])
    for request in sent:
        result = results[request.index]
        assert isinstance(result, Completion)
        for answer in result.samples or (result,):
            assert fits(answer.text, request.sampling["structured_outputs"]) or answer.finish_reason == "length"
    assert _text(results[1]) in ("yes", "no")


def test_a_form_that_only_the_engine_can_refuse_fails_its_row_alone(engine: Engine) -> None:
    good = requests(6, max_tokens=8)
    good[1] = replace(good[1], sampling={**good[1].sampling, "structured_outputs": FORMS[1]})
    bad: list[dict[str, Any]] = [{"grammar": "this is no grammar"}]
    if _is_vllm(engine):
        bad += [
            {"json_schema": '{"type":"string","pattern":"("}'},
            {"json_schema": '{"$ref":"#/$defs/none"}'},
            {"regex": "(?<=a)b"},
        ]
    sampling = [{**good[0].sampling, "structured_outputs": form} for form in bad]
    sampling.append({**sampling[0], "temperature": 1, "n": 3})
    refused = [Request(100 + i, good[0].tokens, s) for i, s in enumerate(sampling)]
    results = drain(engine, [*good[:3], *refused, *good[3:]])
    for request in refused:
        failure = results.pop(request.index)
        assert isinstance(failure, Failure), request.sampling
        assert (failure.code, failure.transient) == ("bad_schema", False)
        assert failure.message
    assert all(isinstance(r, Completion) for r in results.values())
    assert all(isinstance(r, Completion) for r in drain(engine, good[:2]).values())


def test_limits_are_told(engine: Engine) -> None:
    assert engine.limits.max_model_len == 512
    assert engine.limits.max_num_seqs == 8
    assert engine.limits.kv_tokens >= 512
    assert engine.limits.kv_tokens % engine.limits.block_size == 0


def test_an_unknown_kind_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(EngineError, match="vllm, stub"):
        open_engine(EngineSettings(kind="other", model="x"))


def test_stub_faults_are_seeded() -> None:
    def outcome(seed: int) -> list[type]:
        engine = open_engine(settings("stub", seed=seed, fail_rate=0.5))
        return [type(r) for _, r in sorted(drain(engine, requests(40)).items())]

    assert outcome(1) == outcome(1) != outcome(2)
    assert {Completion, Failure} == set(outcome(1))


def test_stub_can_finish_in_another_order() -> None:
    engine = open_engine(settings("stub", shuffle=True, output_tokens=5))
    assert list(drain(engine, requests(8, max_tokens=9))) != list(range(8))


def test_stub_answers_as_told() -> None:
    told = {"answers": {"abc": '{"a": 1'}, "cut": ["abc"], "short": ["abc"], "neg_inf": ["abc"]}
    engine = open_engine(settings("stub", **told))
    text = [int.from_bytes(b"abc", "little")]
    sampling = {"temperature": 1, "max_tokens": 9, "n": 3, "logprobs": 2}
    marked, other = Request(0, text, sampling), Request(1, [5], sampling)
    results = drain(engine, [marked, other])
    first, second = results[0], results[1]
    assert isinstance(first, Completion)
    assert isinstance(second, Completion)
    assert [(s.text, s.finish_reason, s.output_tokens) for s in first.samples] == [('{"a": 1', "length", 9)] * 2
    assert len(second.samples) == 3
    assert first.logprobs is not None
    assert second.logprobs is not None
    assert first.logprobs.top_logprobs[1] == -math.inf
    assert -math.inf not in second.logprobs.top_logprobs


def test_stub_dies_at_start_as_often_as_told() -> None:
    with pytest.raises(EngineError, match="told to die"):
        open_engine(settings("stub", die_on_start=1))


def _is_vllm(engine: Engine) -> bool:
    return type(engine).__name__ == "VllmEngine"


def _text(result: Completion | Failure) -> str:
    assert isinstance(result, Completion)
    return result.text
