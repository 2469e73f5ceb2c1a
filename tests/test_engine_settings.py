"""Which engine settings follow from rows and device, who says so, and that the user's own always win."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bulkgen.errors import SpecError
from bulkgen.sizing import (
    GIB,
    Architecture,
    Choices,
    Demand,
    Device,
    Place,
    Rows,
    Setting,
    StepModel,
    chosen_args,
    chosen_env,
    find_device,
    resolve,
    serve,
)
from tests.sizing_models import LLAMA_31_8B, SMOLLM2_135M

CPU = Device(
    name="CPU, 2 cores",
    kind="cpu",
    memory_bytes=16 * GIB,
    bandwidth_bytes_s=20e9,
    flops={"float32": 2e11, "bfloat16": 2e11, "float16": 2e11},
    source="made up",
)
SMALL, LARGE = find_device("l4"), find_device("h100")
DEMAND = Demand(longest=1000, sequences=10_000)


def setting(name: str, settings: tuple[Setting, ...]) -> Setting:
    return next(s for s in settings if s.name == name)


def chosen(name: str, demand: Demand = DEMAND, place: Place | None = None, **given: Any) -> Setting:
    return setting(name, resolve(given, demand, place or Place(device=CPU), 8192))


def rows(number: int = 1000, prompt: int = 100, output: int = 100, **more: Any) -> Rows:
    prompts, outputs = np.full(number, prompt), np.full(number, output)
    return Rows(prompt=prompts, output=outputs, budget=outputs, answers=number, **more)


def served(architecture: dict[str, Any], of: Rows, device: Device, **given: Any) -> Any:
    env = given.pop("env", {})
    replicas = given.pop("replicas", 1)
    return serve(Architecture.of(architecture), of, device, Choices(args=given, env=env, replicas=replicas))


@pytest.mark.parametrize(
    ("longest", "model", "source", "value"),
    [
        (1000, 8192, "computed", 1008),
        (8190, 8192, "default", 8192),
        (1, None, "computed", 16),
        (16, 8192, "computed", 16),
    ],
)
def test_the_context_follows_from_the_longest_row(longest: int, model: int | None, source: str, value: int) -> None:
    found = setting("max_model_len", resolve({}, replace(DEMAND, longest=longest), Place(device=CPU), model))
    assert (found.source, found.value) == (source, value)


def test_what_the_user_set_stands_and_says_what_it_costs() -> None:
    long = chosen("max_model_len", max_model_len=8192)
    assert (long.source, long.value) == ("user", 8192)
    assert "would be 1008 otherwise" in long.reason
    assert "one sequence of this length" in long.costs
    same = chosen("max_model_len", max_model_len=1008)
    assert (same.source, same.costs) == ("user", "")
    demand = replace(DEMAND, shared={32: 0.6, 128: 0.2})
    assert chosen("enable_prefix_caching", demand, enable_prefix_caching=False).costs.startswith("60%")
    plain = Place(device=CPU, small_blocks=True)
    assert chosen("block_size", demand, plain, block_size=128).costs.startswith("40%")
    assert chosen("dtype", place=Place(device=CPU, bfloat16=False), dtype="bfloat16").costs


def test_only_what_is_not_the_engines_default_is_given_to_it() -> None:
    settings = resolve({"max_num_seqs": 7}, DEMAND, Place(device=CPU, bfloat16=False), 8192)
    args = chosen_args(settings)
    assert args == {"max_model_len": 1008, "max_num_seqs": 7, "enforce_eager": True, "dtype": "float32"}
    assert chosen_env(settings) == {}


@pytest.mark.parametrize(
    ("shared", "block"),
    [({}, 128), ({32: 0.5, 128: 0.5}, 128), ({32: 0.52, 128: 0.5}, 32), ({32: 0.005, 128: 0.0}, 128)],
)
def test_a_smaller_block_where_more_prefixes_are_found(shared: dict[int, float], block: int) -> None:
    place = Place(device=CPU, small_blocks=True)
    assert chosen("block_size", replace(DEMAND, shared=shared), place).value == block
    # Latent and sliding attention have block sizes of their own.
    assert chosen("block_size", replace(DEMAND, shared=shared)).value == 128
    assert chosen("block_size", replace(DEMAND, shared=shared), Place(device=LARGE)).value == 16


def test_batch_limits_are_those_of_vllm_for_offline_use() -> None:
    for device, seqs, tokens in (
        (CPU, 256, 4096),
        (SMALL, 256, 8192),
        (LARGE, 1024, 16384),
        (find_device("a100-80"), 256, 8192),
    ):
        place = Place(device=device)
        assert chosen("max_num_seqs", place=place).value == seqs
        assert chosen("max_num_batched_tokens", place=place).value == tokens


def test_more_sequences_where_the_cache_holds_more() -> None:
    place = Place(device=SMALL, kv_tokens=200_000, concurrency=700.0)
    found = chosen("max_num_seqs", place=place)
    assert (found.source, found.value) == ("computed", 704)
    assert chosen("max_num_seqs", place=replace(place, concurrency=1e6)).value == 1024
    assert chosen("max_num_seqs", place=replace(place, concurrency=20.0)).value == 256
    # A CPU is bound by arithmetic long before that.
    assert chosen("max_num_seqs", place=replace(place, device=CPU)).value == 256
    assert chosen("max_num_seqs", replace(DEMAND, sequences=12), place).value == 12


def test_compiling_pays_for_long_jobs_only() -> None:
    assert chosen("enforce_eager").value is True
    assert chosen("enforce_eager", replace(DEMAND, expected_s=299.0)).value is True
    assert chosen("enforce_eager", replace(DEMAND, expected_s=301.0)).value is False
    assert chosen("enforce_eager", place=Place(device=LARGE)).value is False


def test_the_cache_of_a_cpu_is_what_the_batch_fills_and_no_more_than_half_of_the_memory() -> None:
    few = served(SMOLLM2_135M, rows(10), CPU)
    space = setting("VLLM_CPU_KVCACHE_SPACE", few.settings)
    assert (space.value, space.source, space.where) == (1, "computed", "env")
    many = served(SMOLLM2_135M, rows(5000, 4000, 4000), CPU)
    assert setting("VLLM_CPU_KVCACHE_SPACE", many.settings).value == 7
    halved = served(SMOLLM2_135M, rows(5000, 4000, 4000), CPU, replicas=2)
    assert setting("VLLM_CPU_KVCACHE_SPACE", halved.settings).value == 3
    own = served(SMOLLM2_135M, rows(10), CPU, env={"VLLM_CPU_KVCACHE_SPACE": "2"})
    assert setting("VLLM_CPU_KVCACHE_SPACE", own.settings).source == "user"
    assert own.capacity.tokens == 93_184 // 208 * 208 or own.capacity.blocks == 728
    by_bytes = served(SMOLLM2_135M, rows(10), CPU, kv_cache_memory_bytes=3 * GIB)
    assert [s for s in by_bytes.settings if s.where == "env"] == []


def test_what_keeps_the_batch_from_being_larger() -> None:
    assert served(SMOLLM2_135M, rows(10), LARGE).bound == "rows"
    tight = served(LLAMA_31_8B, rows(10_000, 2000, 2000), SMALL)
    assert tight.bound == "KV cache"
    assert tight.running == int(tight.concurrency) < 256
    assert served(LLAMA_31_8B, rows(10_000, 10, 10), LARGE, max_num_seqs=64).bound == "max_num_seqs"


def test_concurrency_counts_the_middle_of_a_row_and_shared_prefixes_once() -> None:
    # 16 tokens a block: 100 + 100 / 2 = 150 tokens are 10 blocks.
    apart = served(LLAMA_31_8B, rows(), LARGE)
    assert apart.concurrency == pytest.approx(apart.capacity.usable_blocks / 10)
    # 96 of 100 prompt tokens shared by all: 54 tokens are 4 blocks, and 6 are held for all.
    together = served(LLAMA_31_8B, rows(shared={16: 96 * 1000}, resident={16: 96}), LARGE)
    assert together.concurrency == pytest.approx((together.capacity.usable_blocks - 6) / 4)


def test_a_model_that_does_not_fit_says_so_with_the_cure() -> None:
    found = served(LLAMA_31_8B, rows(), find_device("t4"), dtype="float16")
    assert found.fault is not None
    assert "tensor_parallel_size" in found.fault


def test_time_by_measured_steps_and_by_rates() -> None:
    steps = StepModel(start_s=0.01, prefill_token_s=1e-4, decode_sequence_s=1e-3, context_token_s=0.0)
    architecture, choices = Architecture.of(SMOLLM2_135M), Choices(args={"max_num_seqs": 100}, env={})
    measured = serve(architecture, rows(), CPU, choices, step_model=steps)
    # 1,000 rows of 99 decode tokens, 100 at once: 990 steps.
    assert measured.steps == 990
    assert measured.seconds.expected == pytest.approx(990 * 0.01 + 100_000 * 1e-4 + 99_000 * 1e-3)
    guessed = serve(architecture, rows(), CPU, choices)
    assert guessed.limit_s < guessed.seconds.low < guessed.seconds.expected < guessed.seconds.high
    assert not guessed.measured


def test_replicas_share_the_rows() -> None:
    one, two = (served(LLAMA_31_8B, rows(), LARGE, replicas=n, max_num_seqs=64) for n in (1, 2))
    assert two.seconds.expected == pytest.approx(one.seconds.expected / 2, rel=0.1)


def test_the_longest_row_counts_whatever_replica_gets_it() -> None:
    budget = np.full(20, 16)
    budget[7] = 3000
    of = Rows(prompt=np.full(20, 30), output=budget, budget=budget, answers=20)
    for replicas in (1, 2, 3):
        assert setting("max_model_len", served(SMOLLM2_135M, of, LARGE, replicas=replicas).settings).value == 3040


def test_sequences_and_tokens_of_a_step_go_together() -> None:
    fewer = served(SMOLLM2_135M, rows(100), LARGE, max_num_batched_tokens=16)
    assert setting("max_num_seqs", fewer.settings).value == 16
    assert fewer.fault is None
    assert "max_num_batched_tokens" in (served(SMOLLM2_135M, rows(100), LARGE, max_num_seqs=10**6).fault or "")
    small = served(SMOLLM2_135M, rows(3, 10, 6), LARGE)
    assert setting("max_num_batched_tokens", small.settings).value == 3 * 16
    whole = resolve({"enable_chunked_prefill": False}, replace(DEMAND, longest=30_000), Place(device=CPU), None)
    assert setting("max_num_batched_tokens", whole).value == 30_000


@pytest.mark.parametrize(
    ("given", "word"), [({"max_model_len": 100_000}, "max_model_len"), ({"block_size": 100}, "block_size")]
)
def test_settings_that_vllm_would_not_take_are_faults(given: dict[str, Any], word: str) -> None:
    assert word in (served(SMOLLM2_135M, rows(10), CPU, **given).fault or "")


def test_several_answers_a_row_take_time_and_room() -> None:
    one, four = (served(SMOLLM2_135M, replace(rows(1000), answers=1000 * n), CPU) for n in (1, 4))
    assert four.seconds.expected > 2 * one.seconds.expected
    few = replace(rows(4, 50, 4000), answers=200)
    assert setting("VLLM_CPU_KVCACHE_SPACE", served(SMOLLM2_135M, few, CPU).settings).value > 5


def test_replicas_on_a_cpu_share_its_cores() -> None:
    one, two = (served(SMOLLM2_135M, rows(2000), CPU, replicas=n) for n in (1, 2))
    assert two.seconds.expected == pytest.approx(one.seconds.expected, rel=0.1)
    assert two.limit_s == pytest.approx(one.limit_s, rel=0.1)


def test_without_a_prefix_cache_nothing_is_saved() -> None:
    of = rows(prompt=1000, shared={128: 900_000, 32: 900_000}, resident={128: 1000, 32: 1000})
    with_cache, without = (served(SMOLLM2_135M, of, CPU, enable_prefix_caching=on) for on in (True, False))
    assert without.seconds.expected > 1.5 * with_cache.seconds.expected
    assert (with_cache.cached_tokens, without.cached_tokens) == (900_000, 0)


def test_what_is_expected_of_answers_changes_no_setting() -> None:
    budget = np.full(3000, 2000)
    short = Rows(prompt=np.full(3000, 100), output=np.full(3000, 20), budget=budget, answers=3000)
    full = replace(short, output=budget)
    l40s = find_device("l40s")
    assert served(LLAMA_31_8B, short, l40s).settings == served(LLAMA_31_8B, full, l40s).settings


def test_memory_is_that_of_the_settings_shown() -> None:
    of = rows(10_000, 20, 20)
    computed = served(LLAMA_31_8B, of, find_device("l40s"))
    seqs = setting("max_num_seqs", computed.settings)
    assert seqs.source == "computed"
    own = served(LLAMA_31_8B, of, find_device("l40s"), max_num_seqs=seqs.value)
    assert own.memory == computed.memory


def test_a_format_without_instructions_is_slow() -> None:
    architecture = Architecture.of(SMOLLM2_135M)
    fast, slow = (
        serve(architecture, rows(), CPU, Choices(args={"dtype": dtype}, env={}), bfloat16=False).seconds.expected
        for dtype in ("float32", "bfloat16")
    )
    assert slow > 4 * fast


def test_context_that_is_shared_counts_as_it_was_measured() -> None:
    # Steps cost by what is in the cache: 1,000 tokens that all share, once a step.
    steps = StepModel(start_s=0.0, prefill_token_s=0.0, decode_sequence_s=0.0, context_token_s=1.0)
    of = rows(100, 1024, 101, shared={128: 1024 * 100}, resident={128: 1024})
    choices = Choices(args={"max_num_seqs": 100, "block_size": 128}, env={})
    found = serve(Architecture.of(SMOLLM2_135M), of, CPU, choices, step_model=steps)
    assert found.steps == 101
    assert found.seconds.expected == pytest.approx(101 * 1024 + 100 * 100 * 50, rel=0.01)


def test_a_setting_that_vllm_would_refuse() -> None:
    with pytest.raises(SpecError, match="KV cache dtype fp3"):
        served(LLAMA_31_8B, rows(), LARGE, kv_cache_dtype="fp3")


def test_a_context_that_may_be_stretched_is_refused_only_beyond_its_positions() -> None:
    architecture = Architecture.of({**SMOLLM2_135M, "max_position_embeddings": 131_072})
    for wanted, refused in ((100_000, False), (200_000, True)):
        choices = Choices(args={"max_model_len": wanted}, env={})
        found = serve(architecture, rows(), CPU, choices, model_length=4096)
        assert ("of the model; lower it" in (found.refusal or "")) == refused
