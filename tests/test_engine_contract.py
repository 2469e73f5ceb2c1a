"""One suite for all engines: whoever feeds an engine relies on exactly this."""

from collections.abc import Iterator
from typing import Any

import pytest

from bulkgen.engine import Engine, EngineSettings, open_engine
from bulkgen.engine.demo_model import prepare_demo_model
from bulkgen.engine.devices import divide
from bulkgen.errors import EngineError
from bulkgen.records import Completion, Failure, Request

# vLLM and torch warn of each other's deprecations while an engine loads.
pytestmark = pytest.mark.filterwarnings("ignore")


def settings(kind: str, **stub: Any) -> EngineSettings:
    if kind == "stub":
        return EngineSettings(
            kind="stub", model="stub", args={"max_num_seqs": 8, "max_model_len": 512}, stub={"step_s": 0.0005, **stub}
        )
    share = divide(1, {})[0]
    own = {"max_model_len": 512, "max_num_seqs": 8, "enforce_eager": True, "dtype": "bfloat16"}
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
    engine.submit(requests(20, max_tokens=30, ignore_eos=True) if _is_vllm(engine) else requests(20, max_tokens=30))
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


def test_stub_dies_at_start_as_often_as_told() -> None:
    with pytest.raises(EngineError, match="told to die"):
        open_engine(settings("stub", die_on_start=1))


def _is_vllm(engine: Engine) -> bool:
    return type(engine).__name__ == "VllmEngine"


def _text(result: Completion | Failure) -> str:
    assert isinstance(result, Completion)
    return result.text
