"""The shape of a workload against plain, slow references: prefixes, groups, repeats, lengths, phases."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulkgen.errors import OutputError
from bulkgen.plan import PhaseCosts, Phases, Plan, PlanWriter, Workload, bucket_edges, load_plan, measure
from bulkgen.plan.hashing import PromptHashes
from bulkgen.plan.lengths import Lengths
from bulkgen.plan.prefixes import PrefixCounter
from bulkgen.plan.repeats import SamplingReader
from bulkgen.records import Prompt, RefusedRow

GREEDY = {"temperature": 0.0, "max_tokens": 512}
RANDOM = {"temperature": 0.8, "max_tokens": 512}

Tokens = Sequence[int]
FEW_PROMPTS = st.lists(st.lists(st.integers(0, 1), max_size=14), max_size=12)
SIZES = st.sets(st.integers(1, 5), min_size=1)


def hashes_of(prompts: Sequence[Tokens]) -> PromptHashes:
    flat = np.array([token for prompt in prompts for token in prompt], np.int32)
    return PromptHashes.of(flat, np.cumsum([0, *map(len, prompts)]).astype(np.int32))


def counted(prompts: Sequence[Tokens], sizes: Sequence[int], most: int = 1 << 22, at_once: int = 5) -> PrefixCounter:
    counter = PrefixCounter(sizes, sum(map(len, prompts)), most)
    for first in range(0, len(prompts), at_once):
        some = prompts[first : first + at_once]
        counter.add(hashes_of(some), np.arange(first, first + len(some)))
    return counter


def chains(prompt: Tokens, size: int) -> list[tuple[int, ...]]:
    return [tuple(prompt[: size * (i + 1)]) for i in range(len(prompt) // size)]


def hits_in_order(prompts: Sequence[Tokens], size: int) -> int:
    """What vLLM's cache counts, if nothing is ever evicted: blocks known without a gap, never the last token."""
    known: set[tuple[int, ...]] = set()
    hits = 0
    for prompt in prompts:
        for chain in chains(prompt, size)[: max(0, len(prompt) - 1) // size]:
            if chain not in known:
                break
            hits += size
        known.update(chains(prompt, size))
    return hits


def tree_groups(prompts: Sequence[Tokens], size: int) -> list[tuple[int, int, int]]:
    """Rows, tokens and savings of each stretch of the radix tree that several rows share."""
    rows = Counter(chain for prompt in prompts for chain in chains(prompt, size))
    groups = []
    for chain, sharing in rows.items():
        goes_on = any(c[:-size] == chain and n == sharing for c, n in rows.items())
        if sharing > 1 and not goes_on:
            begin = len(chain)
            while begin and rows[chain[:begin]] == sharing:
                begin -= size
            groups.append((sharing, len(chain), (sharing - 1) * (len(chain) - begin)))
    return groups


@given(FEW_PROMPTS, SIZES, st.randoms(use_true_random=False))
def test_prefix_hits_are_those_of_the_best_order_of_rows(prompts: list[Tokens], sizes: set[int], rng: Any) -> None:
    shares = counted(prompts, [*sizes]).shares()
    assert [share.block_size for share in shares] == sorted(sizes)
    for share in shares:
        size = share.block_size
        assert share.hit_tokens == hits_in_order(sorted(prompts, key=len), size)
        assert share.share == share.hit_tokens / max(1, sum(map(len, prompts)))
        assert share.error == 0
        seen = Counter(chain for prompt in prompts for chain in chains(prompt, size))
        assert share.shared_tokens == size * sum(n > 1 for n in seen.values())
        any_order = rng.sample(prompts, len(prompts))
        assert 0 <= share.hit_tokens - hits_in_order(any_order, size) <= size * len(prompts)


@given(FEW_PROMPTS, st.integers(1, 4))
def test_groups_are_the_stretches_of_the_radix_tree(prompts: list[Tokens], size: int) -> None:
    groups = counted(prompts, [size, 2 * size]).groups(1000)
    assert sorted((g.rows, g.tokens, g.saved_tokens) for g in groups) == sorted(tree_groups(prompts, size))
    assert [g.saved_tokens for g in groups] == sorted((g.saved_tokens for g in groups), reverse=True)
    for group in groups:
        shared = tuple(prompts[group.example][: group.tokens])
        assert sum(tuple(prompt[: group.tokens]) == shared for prompt in prompts) == group.rows
    assert counted(prompts, [size]).groups(2) == groups[:2]


ALIKE = list(range(100, 164))  # four blocks of 16


@pytest.mark.parametrize(
    ("prompts", "hits"),
    [
        ([], 0),
        ([[]], 0),
        ([ALIKE], 0),
        ([[1, 2, 3]] * 5, 0),  # shorter than a block
        ([ALIKE] * 5, 4 * 48),  # the last block of each holds its last token
        ([[*ALIKE, 1]] * 5, 4 * 64),
        ([ALIKE, [*ALIKE, 1]], 64),
        ([[*ALIKE[:40], 1], [*ALIKE[:40], 2, 3, 4, 5, 6, 7, 8, 9]], 32),  # the prefix ends inside of the third block
        ([[*ALIKE[:16], 7], [1, *ALIKE[1:16], 7]], 0),
        ([[1, *ALIKE[1:]], [2, *ALIKE[1:]]], 0),  # equal blocks behind different ones
        ([[5] * 65, [5] * 33], 32),
        ([[5] * 300_000], 0),
        ([[5] * 300_000, [5] * 300_001], 300_000),
    ],
)
def test_prefix_hits_in_blocks_of_sixteen(prompts: list[Tokens], hits: int) -> None:
    (share,) = counted(prompts, [16]).shares()
    assert share.hit_tokens == hits


def test_prefixes_that_look_alike_have_hashes_of_their_own() -> None:
    rng = np.random.default_rng(3)
    base = rng.integers(0, 50_000, 64).tolist()
    swapped = []
    for later in range(64):
        for earlier in range(later):
            swapped.append([*base])
            swapped[-1][later], swapped[-1][earlier] = base[earlier], base[later]
    short = [[0] * n for n in range(64)] + [[1] * n for n in range(1, 64)] + [[1, 0], [0, 1], [2**31 - 1], [65_536, 0]]
    prompts = [base, *swapped, *short, base[1:], base[:-1]]
    assert len(np.unique(hashes_of(prompts).whole())) == len(set(map(tuple, prompts)))


def test_the_same_prompts_have_the_same_hashes_wherever_they_stand() -> None:
    some = [[1, 2, 3], [], [4], [1, 2, 3, 4]]
    alone = np.concatenate([hashes_of([prompt]).whole() for prompt in some])
    assert hashes_of(some).whole().tolist() == alone.tolist()
    array = pa.array([[9, 9], *some], pa.list_(pa.int32())).slice(1)
    sliced = PromptHashes.of(array.values.to_numpy(), array.offsets.to_numpy())
    assert sliced.whole().tolist() == alone.tolist()


def test_a_sample_of_blocks_stands_for_all_of_them() -> None:
    rng = np.random.default_rng(5)
    heads = rng.integers(0, 50_000, (4, 64)).tolist()
    prompts = [heads[i % 4] + rng.integers(0, 50_000, 8 + i % 90).tolist() for i in range(6000)]
    (exact,) = counted(prompts, [8], at_once=500).shares()
    counter = counted(prompts, [8], most=4000, at_once=500)
    (share,) = counter.shares()
    assert exact.error == 0 < share.error <= 1 / 4000**0.5
    assert abs(share.share - exact.share) < 4 * share.error
    assert share.share != exact.share
    groups = counter.groups(4)
    assert [group.tokens for group in groups] == [64] * 4
    assert {group.example % 4 for group in groups} == {0, 1, 2, 3}
    assert sum(group.rows for group in groups) == pytest.approx(6000, rel=0.3)
    assert sum(group.saved_tokens for group in groups) == pytest.approx(6000 * 64, rel=0.3)


# ---- repeats ----


def keys_of(sampling: dict[str, Any], overrides: Sequence[dict[str, Any]]) -> list[tuple[int, bool, int]]:
    texts = pa.array([json.dumps(own, sort_keys=True, separators=(",", ":")) for own in overrides], pa.string())
    return [tuple(asked) for asked in SamplingReader(sampling).read(texts).tolist()]


@pytest.mark.parametrize(
    ("sampling", "first", "second", "same"),
    [
        (GREEDY, {}, {}, True),
        (GREEDY, {}, {"temperature": 0.0}, True),
        (GREEDY, {}, {"temperature": 0.5}, False),
        (GREEDY, {"seed": 1}, {"seed": 2, "top_p": 0.5, "top_k": 3, "min_p": 0.1}, True),  # greedy all the same
        (GREEDY, {}, {"stop": ["\n"]}, False),
        (GREEDY, {}, {"max_tokens": 7}, True),  # the budget itself is compared
        (RANDOM, {}, {"top_p": 0.5}, False),
        (RANDOM, {"seed": 1}, {"seed": 1}, True),
        (RANDOM, {"seed": 1}, {"seed": 2}, False),
        (RANDOM, {"seed": 1}, {}, False),
        (RANDOM, {"seed": -1}, {}, True),  # means none to vLLM
        (RANDOM | {"seed": 5}, {"seed": 5}, {}, False),  # one from a column is taken as it is, the job's is not
        (RANDOM, {"n": 2}, {}, False),
    ],
)
def test_requests_are_the_same_where_the_engine_is_asked_the_same(
    sampling: dict[str, Any], first: dict[str, Any], second: dict[str, Any], same: bool
) -> None:
    (a, *_), (b, *_) = keys_of(sampling, [first, second])
    assert (a == b) == same


@pytest.mark.parametrize(
    ("sampling", "own", "decided"),
    [
        (GREEDY, {}, True),
        (GREEDY | {"seed": 5}, {}, True),
        (GREEDY, {"temperature": 0.5}, False),
        (RANDOM, {}, False),
        ({}, {}, False),
        (RANDOM, {"temperature": 0}, True),
        (RANDOM, {"seed": 5}, True),
        (RANDOM, {"seed": -1}, False),
        (RANDOM | {"seed": 5}, {}, False),  # each row has a seed of its own
        (RANDOM | {"seed": 5}, {"seed": None}, False),
    ],
)
def test_only_greedy_and_seeded_rows_may_be_answered_once(
    sampling: dict[str, Any], own: dict[str, Any], decided: bool
) -> None:
    assert [asked[1] for asked in keys_of(sampling, [own])] == [decided]


def test_rows_with_many_samplings_are_read_as_those_with_few() -> None:
    overrides = [{"seed": i % 1500, "stop": [str(i % 1200)]} for i in range(6000)]
    keys = [asked[0] for asked in keys_of(RANDOM, overrides)]
    assert len(set(keys)) == 6000  # 1500 and 1200 meet again after 6000
    assert keys_of(RANDOM, [{"stop": ["7"], "seed": 7}])[0][0] == keys[7]


# ---- whole plans ----


def write(folder: Path, rows: Sequence[tuple[Tokens, int, dict[str, Any]] | None]) -> Plan:
    writer = PlanWriter(folder / "plan", bucket_edges([8, 32], 1 << 20))
    for i, row in enumerate(rows):
        key = i.to_bytes(16, "big")
        refused = RefusedRow(i, key, "in.jsonl", i + 1, "bad_json", "no", None, b"{")
        prompt = refused if row is None else Prompt(i, key, list(row[0]), row[1], json.dumps(row[2]))
        writer.add([prompt], [(0, 0)])
    return writer.finish({}, None, 1)


def test_a_plan_without_rows_has_no_shape(tmp_path: Path) -> None:
    workload = measure(write(tmp_path, [None, None]), GREEDY)
    assert (workload.rows, workload.prompt_tokens, workload.budget_tokens, workload.groups) == (0, 0, 0, ())
    assert (workload.total.mean, workload.total.tail, workload.prompt.counts) == (None, None, ())
    assert [share.share for share in workload.prefixes] == [0, 0, 0, 0]
    assert workload.phases().shape is None
    assert workload.phases(16).sentence() == "Nothing to compute."


def test_rows_of_all_buckets_are_counted_and_refused_ones_are_not(tmp_path: Path) -> None:
    long = list(range(60))
    rows = [(long, 5, {}), None, ([*long[:20]], 7, {}), (long, 5, {}), ([1, 2], 9, {"n": 3}), None, ([*long, 1], 5, {})]
    plan = write(tmp_path, rows)
    assert len(plan.facts["batch_rows"]) == 3
    workload = measure(plan, RANDOM, block_sizes=[4, 16], expected_output=6)
    assert (workload.rows, workload.answers) == (5, 7)
    assert workload.prompt_tokens == 60 + 20 + 60 + 2 + 61 == workload.prompt.tokens
    assert workload.budget_tokens == 5 + 7 + 5 + 3 * 9 + 5
    assert workload.expected_tokens == 5 + 6 + 5 + 3 * 6 + 5
    assert (workload.budget.max, workload.total.max) == (9, 66)
    assert workload.prefix(4).hit_tokens == 20 + 56 + 60
    assert workload.prefix(16).hit_tokens == 16 + 48 + 48
    assert [(g.rows, g.tokens) for g in workload.groups] == [(3, 60), (4, 20)]
    with pytest.raises(KeyError):
        workload.prefix(32)


def test_repeats_are_rows_with_tokens_budget_and_sampling_of_another(tmp_path: Path) -> None:
    a, b = [1, 2, 3], [1, 2, 3, 4]
    own = {"temperature": 0.5, "seed": 3}
    rows = [
        *((a, 5, {}), (a, 6, {}), (b, 5, {}), (a, 5, {})),
        *((b, 5, own), (b, 5, own), (b, 5, {"temperature": 0.5}), (b, 5, {"temperature": 0.5, "n": 2})),
        *((b, 5, {"temperature": 0.5}), (a, 5, {}), (b, 5, {"temperature": 0.5, "n": 2})),
    ]
    repeats = measure(write(tmp_path, rows), GREEDY).repeats
    assert (repeats.rows, repeats.prompt_tokens, repeats.budget_tokens) == (5, 3 + 4 + 4 + 3 + 4, 5 * 4 + 10)
    assert (repeats.decided_rows, repeats.decided_prompt_tokens, repeats.decided_budget_tokens) == (3, 10, 15)


def test_a_plan_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    plan = write(tmp_path, [([1, 2, 3], 5, {})])
    path = plan.folder / "bucket-00.arrow"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(OutputError, match="cannot be read"):
        measure(load_plan(plan.folder), GREEDY)


# ---- lengths ----


@given(st.lists(st.integers(0, 5000) | st.integers(900, 950), min_size=1, max_size=60))
def test_every_length_is_in_one_bin_of_the_histogram(tokens: list[int]) -> None:
    lengths = Lengths.of(np.array(tokens))
    bins = zip(lengths.edges, lengths.edges[1:], lengths.counts, strict=False)
    assert [sum(a <= n < b for n in tokens) for a, b, _ in bins] == [*lengths.counts]
    assert sum(lengths.counts) == len(tokens) == lengths.rows
    assert len(lengths.counts) <= 14
    assert lengths.counts[0] > 0 < lengths.counts[-1] or len(lengths.counts) == 1


def test_scales_of_histograms() -> None:
    assert Lengths.of(np.array([300, 420])).edges == tuple(range(300, 441, 20))
    assert Lengths.of(np.array([9, 10])).edges == (9, 10, 11)
    assert Lengths.of(np.array([20, 700])).edges == (16, 32, 64, 128, 256, 512, 1024)
    assert Lengths.of(np.array([0, 8])).edges == (0, 1, 2, 4, 8, 16)


def test_figures_of_lengths() -> None:
    lengths = Lengths.of(np.arange(101))
    assert (lengths.mean, lengths.p50, lengths.p90, lengths.p99, lengths.max) == (50, 50, 90, 99, 100)
    assert lengths.variation == pytest.approx(np.arange(101).std() / 50)
    assert lengths.tail == 99 / 50
    assert (Lengths.of(np.full(7, 12)).variation, Lengths.of(np.full(7, 12)).tail) == (0, 1)
    assert (Lengths.of(np.zeros(3, np.int64)).variation, Lengths.of(np.zeros(3, np.int64)).tail) == (None, None)


# ---- phases ----


@pytest.mark.parametrize(
    ("prefill", "decode", "costs", "shape"),
    [
        (8192, 1023, None, "long in, short out"),
        (1024, 8191, None, "short in, long out"),
        (1024, 1023, None, "mixed"),
        (75, 25, None, "long in, short out"),
        (74, 26, None, "mixed"),
        (25, 75, None, "short in, long out"),
        (100, 0, None, "long in, short out"),
        (8192, 1023, (0.001, 0.1), "short in, long out"),
        (8192, 1023, (0.001, 0.008), "mixed"),
        (0, 0, None, None),
    ],
)
def test_a_phase_dominates_from_three_quarters_on(
    prefill: int, decode: int, costs: tuple[float, float] | None, shape: str | None
) -> None:
    known = PhaseCosts(prefill_token_s=costs[0], decode_token_s=costs[1]) if costs else None
    phases = Phases(prefill_tokens=prefill, decode_tokens=decode, output="budgeted", costs=known)
    assert phases.shape == shape


def test_what_the_prefix_cache_holds_changes_the_shape(tmp_path: Path) -> None:
    workload: Workload = measure(write(tmp_path, [([*range(160), i], 21, {}) for i in range(20)]), GREEDY)
    assert workload.phases().prefill_tokens == 161 * 20
    assert workload.phases(16).prefill_tokens == 161 * 20 - 160 * 19
    assert workload.phases().decode_tokens == 20 * 20
    assert workload.phases().shape == "long in, short out"
    assert workload.phases(128).shape == "mixed"
    assert workload.phases(16).shape == "mixed"
    assert workload.phases().prefill_share == pytest.approx(161 / 181)


def test_the_sentence_names_shape_measure_and_metric() -> None:
    phases = Phases(prefill_tokens=900, decode_tokens=100, output="expected")
    assert phases.sentence() == (
        "Long in, short out: prefill takes 90% of the tokens to compute, with output as expected. What counts for an "
        "offline job is tokens/second and cost per token; watch prompt tokens/s (prefill)."
    )
    costs = PhaseCosts(prefill_token_s=1.0, decode_token_s=99.0)
    sentence = Phases(prefill_tokens=900, decode_tokens=100, output="budgeted", costs=costs).sentence()
    assert "8% of the device time" in sentence
    assert "watch output tokens/s (decode)" in sentence


@pytest.mark.real
def test_prefix_hits_are_those_of_vllms_own_cache_manager() -> None:
    import torch
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    rng = np.random.default_rng(11)
    prompts = [rng.integers(0, 2, n).tolist() for n in rng.integers(1, 90, 300)]
    prompts += [[1] * 32, [1] * 32, [1] * 33, [1] * 64, [1] * 65]
    prompts.sort(key=len)
    init_none_hash(sha256)
    for size in (4, 16):
        spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        manager = KVCacheManager(
            KVCacheConfig(20_000, [], [KVCacheGroupSpec(["layer"], spec)]),
            max_model_len=128,
            scheduler_block_size=size,
            hash_block_size=size,
        )
        hits = 0
        for i, prompt in enumerate(prompts):
            request = Request(
                request_id=str(i),
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(max_tokens=1),
                pooling_params=None,
                block_hasher=get_request_block_hasher(size, sha256),
            )
            blocks, hit, _ = manager.get_computed_blocks(request)
            assert manager.allocate_slots(request, len(prompt) - hit, hit, blocks) is not None
            manager.free(request)
            hits += hit
        (share,) = counted(prompts, [size]).shares()
        assert share.hit_tokens == hits > 0
