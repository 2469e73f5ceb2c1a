"""The least a job can cost, and step times fitted to measured steps."""

import json
from dataclasses import replace

import numpy as np
import pytest

from bulkgen.sizing.device import Device, find_device
from bulkgen.sizing.roofline import (
    Calibration,
    ModelWork,
    Physics,
    Step,
    StepModel,
    StepSample,
    Work,
    attention_flops,
    calibrate,
    job_tokens,
    job_work,
    least_steps,
    limit_s,
    share_of_limit,
    step_work,
    steps_limit_s,
)

RNG = np.random.default_rng(11)
PLAIN = Device(
    name="plain", memory_bytes=1 << 30, bandwidth_bytes_s=100.0, flops={"bfloat16": 1000.0}, source="made up"
)
MODEL = ModelWork(
    weights_bytes=500,
    parameters=200,
    head_parameters=50,
    kv_bytes_per_token=4.0,
    attention_flops=attention_flops(2, 1, 3),
)
LLAMA_8B = ModelWork(
    weights_bytes=15_009_849_344,
    parameters=6_979_321_856,
    head_parameters=525_336_576,
    kv_bytes_per_token=131_072,
    attention_flops=attention_flops(32, 32, 128),
)


def test_operations_and_bytes_of_a_step_by_hand() -> None:
    step = Step.of(prompts=[3, 1], contexts=[5, 7])
    assert step == Step(
        prefill_tokens=4, decode_sequences=2, context_tokens=12, prefill_pairs=6 + 1, finished_prompts=2
    )
    work = step_work(MODEL, step)
    assert work.flops == 2 * (200 * 6 + 50 * 4) + 2 * 2 * 1 * (3 + 3) * (7 + 12)
    assert work.bytes == 500 + 4 * (12 + 6)


def test_nothing_to_do_costs_nothing() -> None:
    assert step_work(MODEL, Step()) == Work(0.0, 0.0)


def test_the_slower_of_arithmetic_and_traffic_is_the_limit() -> None:
    assert limit_s(Work(flops=5000, bytes=100), PLAIN, "bfloat16") == 5.0
    assert limit_s(Work(flops=5000, bytes=900), PLAIN, "bfloat16") == 9.0
    assert limit_s(Work(flops=5000, bytes=900), PLAIN, "bfloat16", gpus=2) == 4.5


def test_a_known_case_lies_below_what_was_measured() -> None:
    """Llama 3.1 8B on an A100 of 80 GB, vLLM 0.31: 11.5 ms a token for one sequence, 140 ms for 2,035 prompt tokens."""
    a100 = find_device("a100-80")
    decode = limit_s(step_work(LLAMA_8B, Step.of(contexts=[2100])), a100, "bfloat16")
    prefill = limit_s(step_work(LLAMA_8B, Step.of(prompts=[2035])), a100, "bfloat16")
    assert 60 < share_of_limit(decode, 0.0115) < 80
    assert 60 < share_of_limit(prefill, 0.140) < 80


def test_routed_experts_are_read_as_far_as_tokens_meet_them() -> None:
    sparse = replace(MODEL, routed_bytes=1000, routed_share=0.25)
    assert sparse.read_bytes(1) == 500 + 250
    assert sparse.read_bytes(2) == 500 + 250 + 0.75 * 250
    assert sparse.read_bytes(1000) == pytest.approx(1500)
    assert replace(sparse, routed_share=1.0).read_bytes(1) == 1500


def every_step(prompt: int, output: int, cached: int = 0) -> list[Step]:
    """One request alone: its prefill in one step, then a step for each further token."""
    pairs = sum(range(cached + 1, prompt + 1))
    first = Step(prefill_tokens=prompt - cached, prefill_pairs=pairs, finished_prompts=1)
    return [first, *(Step.of(contexts=[prompt + i]) for i in range(1, output))]


def test_a_jobs_numbers_are_the_sums_over_its_steps() -> None:
    prompts, outputs, cached = np.array([5, 9, 4]), np.array([4, 1, 6]), np.array([0, 8, 3])
    steps = [
        step
        for p, o, c in zip(prompts.tolist(), outputs.tolist(), cached.tolist(), strict=True)
        for step in every_step(p, o, c)
    ]
    job = job_tokens(prompts, outputs, cached)
    assert job.prefill_tokens == sum(step.prefill_tokens for step in steps) == 5 + 1 + 1
    assert job.decode_tokens == sum(step.decode_sequences for step in steps) == 3 + 0 + 5
    assert job.prefill_pairs == sum(step.prefill_pairs for step in steps)
    assert job.decode_pairs == sum(step.context_tokens for step in steps)
    assert job.most_output_tokens == 6
    by_steps = [step_work(MODEL, step) for step in steps]
    whole = job_work(MODEL, job, len(steps))
    assert whole.flops == pytest.approx(sum(work.flops for work in by_steps))
    assert whole.bytes == pytest.approx(sum(work.bytes for work in by_steps))


def test_lengths_of_32_bits_do_not_overflow() -> None:
    long = np.full(1000, 100_000, np.int32)
    assert job_tokens(long, long).prefill_pairs == 1000 * 100_000 * 100_001 // 2


def test_the_whole_jobs_limit_is_below_every_schedule() -> None:
    steps = every_step(40, 30) + every_step(10, 5)
    job = job_tokens(np.array([40, 10]), np.array([30, 5]))
    one_by_one = steps_limit_s(MODEL, steps, PLAIN, "bfloat16")
    at_once = limit_s(job_work(MODEL, job, len(steps)), PLAIN, "bfloat16")
    assert 0 < at_once <= one_by_one
    fewer = limit_s(job_work(MODEL, job, 30), PLAIN, "bfloat16")
    assert fewer <= at_once


@pytest.mark.parametrize("device", [PLAIN, replace(PLAIN, bandwidth_bytes_s=1e9)], ids=["memory", "arithmetic"])
def test_the_limit_is_the_same_from_what_is_put_on_record(device: Device) -> None:
    model = replace(MODEL, routed_bytes=300, routed_share=0.25)
    job = job_tokens(np.array([40, 10]), np.array([30, 5]), np.array([16, 0]))
    told = json.loads(json.dumps(Physics.of(model, device, "bfloat16", 2).to_json()))
    at_once = limit_s(job_work(model, job, 31), device, "bfloat16", 2)
    assert Physics.from_json(told).limit_s(job, 31) == pytest.approx(at_once)


def test_the_least_number_of_steps() -> None:
    job = job_tokens(np.full(100, 50), np.full(100, 21))
    roomy = 10**9
    assert least_steps(job, 1000, 10**6, roomy) == 21  # no answer is shorter than its tokens
    assert least_steps(job, 10, 10**6, roomy) == 100 * 20 // 10
    assert least_steps(job, 1000, 100, roomy) == (100 * 50 + 100 * 20) // 100
    pairs = 100 * sum(50 + i for i in range(1, 21))
    assert least_steps(job, 1000, 10**6, 500) == pairs // 500
    empty = np.array([], np.int32)
    assert least_steps(job_tokens(empty, empty), 10, 100, 100) == 0


def test_shares_are_per_cent() -> None:
    assert share_of_limit(3.0, 4.0) == 75.0
    assert share_of_limit(3.0, 0.0) == 0.0


TRUTH = StepModel(start_s=0.008, prefill_token_s=5e-5, decode_sequence_s=4e-5, context_token_s=3e-8)


def measured(steps: int, noise: float = 0.0, truth: StepModel = TRUTH) -> list[StepSample]:
    samples = []
    for _ in range(steps):
        contexts = RNG.integers(100, 4000, RNG.integers(1, 256)).tolist()
        prompts = RNG.integers(50, 2000, RNG.integers(0, 4)).tolist()
        step = Step.of(prompts, contexts)
        samples.append(StepSample(step, truth.step_s(step) * float(1 + noise * RNG.uniform(-1, 1))))
    return samples


def same(found: Calibration, truth: StepModel, rel: float) -> bool:
    return found.model._coefficients() == pytest.approx(truth._coefficients(), rel=rel, abs=1e-12)


def test_coefficients_are_found_again() -> None:
    found = calibrate(measured(40))
    assert same(found, TRUTH, 1e-6)
    assert found.error < 1e-9
    assert found.samples == 40


def test_noise_moves_predictions_little_and_is_reported() -> None:
    found = calibrate(measured(400, noise=0.1))
    for sample in measured(50):
        assert found.model.step_s(sample.step) == pytest.approx(sample.seconds, rel=0.05)
    assert 0.03 < found.error < 0.07  # a uniform deviation of at most 10% is 5% in the mean


def test_no_coefficient_is_negative() -> None:
    """Samples that fall as the context grows would want a negative coefficient."""
    steps = [Step(decode_sequences=n, context_tokens=1000 * n * n) for n in range(1, 30)]
    samples = [StepSample(step, 0.05 + 0.001 * step.decode_sequences - 2e-8 * step.context_tokens) for step in steps]
    found = calibrate(samples).model
    assert min(found._coefficients()) >= 0
    assert found.context_token_s == 0
    assert found.start_s > 0


def test_the_solution_is_the_best_of_all_that_are_not_negative() -> None:
    samples = measured(30, noise=0.5, truth=replace(TRUTH, context_token_s=0.0))
    found = calibrate(samples).model

    def badness(model: StepModel) -> float:
        return sum((model.step_s(s.step) / s.seconds - 1) ** 2 for s in samples)

    for _ in range(300):
        other = StepModel(
            start_s=max(0.0, found.start_s + 0.01 * RNG.normal()),
            prefill_token_s=max(0.0, found.prefill_token_s + 1e-5 * RNG.normal()),
            decode_sequence_s=max(0.0, found.decode_sequence_s + 1e-5 * RNG.normal()),
            context_token_s=max(0.0, found.context_token_s + 1e-8 * RNG.normal()),
        )
        assert badness(found) <= badness(other)


def test_terms_that_samples_cannot_tell_apart_are_left_out() -> None:
    """All sequences have the same context: one of the two terms explains both, and nothing says anything of prompts."""
    steps = [Step(decode_sequences=n, context_tokens=500 * n) for n in range(1, 20)]
    found = calibrate([StepSample(step, TRUTH.step_s(step)) for step in steps])
    assert sum(c > 0 for c in found.model._coefficients()) == 2
    assert found.model.prefill_token_s == 0
    for step in steps:
        assert found.model.step_s(step) == pytest.approx(TRUTH.step_s(step))


def test_the_demo_model_on_a_cpu() -> None:
    """Measured on a CPU with AMX: 117 ms with 67 sequences, 220 ms with 133, 2.2 s for 4,000 prompt tokens."""
    samples = [
        StepSample(Step(decode_sequences=67), 0.117),
        StepSample(Step(decode_sequences=133), 0.220),
        StepSample(Step(prefill_tokens=4000), 2.2),
    ]
    found = calibrate(samples)
    assert found.error < 1e-6
    assert found.model.start_s == pytest.approx(0.0124, abs=0.001)
    assert found.model.decode_sequence_s == pytest.approx(0.00156, rel=0.01)
    assert found.model.step_s(Step(decode_sequences=100)) == pytest.approx(0.1685, rel=0.01)


def test_a_jobs_time_is_the_sum_of_its_steps() -> None:
    steps = every_step(40, 30) + every_step(10, 5)
    job = job_tokens(np.array([40, 10]), np.array([30, 5]))
    assert TRUTH.job_s(job, len(steps)) == pytest.approx(sum(TRUTH.step_s(step) for step in steps))


def test_before_anything_is_measured_a_share_of_the_limit_is_assumed() -> None:
    h100 = find_device("h100")
    full = StepModel.assumed(LLAMA_8B, h100, "bfloat16", efficiency=1.0)
    half = StepModel.assumed(LLAMA_8B, h100, "bfloat16", efficiency=0.5, start_s=0.002)
    for contexts in ([500], [500] * 64, [2000] * 256):
        step = Step.of(contexts=contexts)
        limit = limit_s(step_work(LLAMA_8B, step), h100, "bfloat16")
        assert limit <= full.step_s(step) * (1 + 1e-9)
        assert full.step_s(step) <= 2 * limit
        assert half.step_s(step) == pytest.approx(2 * full.step_s(step) + 0.002)


@pytest.mark.parametrize("samples", [[], [StepSample(Step(decode_sequences=1), 0.0)]])
def test_samples_that_say_nothing_are_refused(samples: list[StepSample]) -> None:
    with pytest.raises(ValueError, match="longer than zero seconds"):
        calibrate(samples)
