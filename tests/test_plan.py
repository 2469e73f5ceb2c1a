"""The plan: shards balanced by tokens, rows found again by key, state that survives a reopening."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bulkgen.plan import Plan, PlanWriter, bucket_edges, cut_shards, find_plan, load_plan, planned, regroup
from bulkgen.plan.grouping import Grouping, prefix_hashes, prefix_lengths
from bulkgen.plan.hashing import PromptHashes
from bulkgen.records import Prompt, RefusedRow

RNG = np.random.default_rng(7)


def prompt(ordinal: int, tokens: int, key: bytes | None = None, max_tokens: int = 10) -> Prompt:
    ids = RNG.integers(0, 50_000, tokens).tolist()
    return Prompt(ordinal, key or ordinal.to_bytes(16, "big"), ids, max_tokens, "{}")


def refused(ordinal: int) -> RefusedRow:
    return RefusedRow(ordinal, ordinal.to_bytes(16, "big"), "in.jsonl", ordinal + 1, "bad_json", "no", None, b"{")


def write(folder: Path, rows: list[Prompt | RefusedRow], target_rows: int | None = 10, replicas: int = 1) -> Plan:
    writer = PlanWriter(folder / "plan", bucket_edges(None, 4096))
    for i in range(0, len(rows), 7):
        some = rows[i : i + 7]
        writer.add(some, [(1000 + row.ordinal, row.ordinal // 2) for row in some])
    return writer.finish({"made_from": "test"}, target_rows, replicas)


def test_every_row_is_in_exactly_one_shard_and_comes_back_as_it_went_in(tmp_path: Path) -> None:
    rows: list[Prompt | RefusedRow] = [
        refused(i) if i % 17 == 3 else prompt(i, int(RNG.integers(1, 3000))) for i in range(5000)
    ]
    plan = write(tmp_path, rows, target_rows=100)
    seen = {row.ordinal: row for shard in plan.shards for row in plan.read(shard)}
    sent = [row for row in rows if isinstance(row, Prompt)]
    assert len(seen) == len(sent) == sum(shard.rows for shard in plan.shards)
    for row in sent:
        back = seen[row.ordinal]
        assert (back.key, back.tokens.tolist(), back.max_tokens) == (
            row.key,
            list(row.tokens),
            row.max_tokens,
        )
    assert plan.refused == len(rows) - len(sent)


def test_a_shard_holds_prompts_of_one_length_range_only(tmp_path: Path) -> None:
    plan = write(tmp_path, [prompt(i, int(RNG.integers(1, 4000))) for i in range(400)])
    for shard in plan.shards:
        lengths = [len(row.tokens) for row in plan.read(shard)]
        shorter = max((s.longest for s in plan.shards if s.longest < shard.longest), default=0)
        assert shorter < min(lengths) <= max(lengths) <= shard.longest


def test_shards_of_a_bucket_are_balanced_by_tokens_not_by_rows() -> None:
    prompts = np.concatenate([np.full(900, 130), np.full(100, 250)]).astype(np.int32)
    budgets = np.concatenate([np.full(900, 10), np.full(100, 2000)]).astype(np.int32)
    shards = cut_shards(1, 256, prompts, budgets, 100, 0)
    costs = [s.prompt_tokens + s.budget_tokens for s in shards]
    assert len(shards) == 10
    assert max(costs) - min(costs) <= 2 * 2250  # a border is off by one row at most
    assert max(s.rows for s in shards) > 5 * min(s.rows for s in shards)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 99])
def test_shards_cover_small_buckets_without_gap_or_overlap(rows: int) -> None:
    lengths = np.full(rows, 5, np.int32)
    shards = cut_shards(0, 128, lengths, lengths, 2, 4)
    assert [s.first for s in shards] == np.cumsum([0, *[s.rows for s in shards]])[:-1].tolist()
    assert sum(s.rows for s in shards) == rows
    assert [s.shard for s in shards] == list(range(4, 4 + len(shards)))


def test_the_last_bucket_holds_the_longest_prompt_that_is_possible() -> None:
    assert bucket_edges(None, 1000) == [128, 256, 512, 999]
    assert bucket_edges([64, 5000, 64], 1000) == [64, 999]
    assert bucket_edges(None, 1) == [1]


def test_rows_equal_in_everything_get_keys_of_their_own_and_the_same_ones_each_time(tmp_path: Path) -> None:
    same = b"\x07" * 15 + b"\0"
    rows: list[Prompt | RefusedRow] = [prompt(i, 5, same if i in (2, 5, 6) else None) for i in range(8)]
    keys = write(tmp_path / "a", rows).keys_of(np.arange(8))
    assert len(set(keys)) == 8
    assert keys[2] == same
    longer = [*rows, prompt(8, 5, same)]
    assert write(tmp_path / "b", longer).keys_of(np.arange(8)) == keys


def test_lookup_finds_each_key_and_no_other(tmp_path: Path) -> None:
    plan = write(tmp_path, [prompt(i, 3, RNG.bytes(15) + bytes([i % 3])) for i in range(1000)])
    wanted = np.array([*plan.keys_of(np.arange(1000))[::-1], b"\x01" * 16], "S16")
    assert plan.lookup(wanted).tolist() == [*range(999, -1, -1), -1]


def test_a_row_is_committed_once(tmp_path: Path) -> None:
    plan = write(tmp_path, [prompt(i, 3) for i in range(10)])
    assert plan.commit(np.array([1, 2]))
    assert not plan.commit(np.array([2, 3]))
    assert not plan.commit(np.array([4, 4]))
    assert sum(plan.pending(s)[0] for s in plan.shards) == 8
    again = load_plan(tmp_path / "plan", "driver")
    assert [row.ordinal for s in again.shards for row in again.read(s)] == [0, 3, 4, 5, 6, 7, 8, 9]
    again.forget_commits()
    assert sum(plan.pending(s)[0] for s in plan.shards) == 10


def test_a_refused_row_can_never_be_committed(tmp_path: Path) -> None:
    plan = write(tmp_path, [prompt(0, 3), refused(1)])
    assert not plan.commit(np.array([1]))


def test_a_plan_without_rows_is_a_plan(tmp_path: Path) -> None:
    plan = write(tmp_path, [])
    assert (plan.rows, plan.shards) == (0, ())
    assert plan.lookup(np.array([b"x" * 16], "S16")).tolist() == [-1]


def test_a_writer_that_never_finished_leaves_no_plan(tmp_path: Path) -> None:
    writer = PlanWriter(tmp_path / "plan", [10])
    writer.add([prompt(0, 3)], [(0, 0)])
    writer.discard()
    assert list(tmp_path.iterdir()) == []
    assert write(tmp_path, [prompt(0, 3)]).rows == 1


@pytest.mark.parametrize("name", ["keys.bin", "state.bin", "bucket-00.arrow", "plan.json"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_plan_that_is_not_whole_is_no_plan(tmp_path: Path, name: str, damage: str) -> None:
    write(tmp_path, [prompt(i, 3) for i in range(5)])
    path = tmp_path / "plan" / name
    path.unlink() if damage == "missing" else path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises((FileNotFoundError, ValueError)):
        load_plan(tmp_path / "plan")


def test_offers_tell_what_was_in_an_engine_when_it_died(tmp_path: Path) -> None:
    plan = write(tmp_path, [prompt(i, 20) for i in range(6)])
    replica = load_plan(plan.folder, "replica")
    assert [replica.offers.begin(i) for i in (0, 1, 2)] == [1, 1, 1]
    replica.offers.end(0, done=True)
    replica.offers.end(1, done=False)
    assert replica.offers.begin(1) == 2
    in_engine, done = plan.offers.take_back(np.arange(6))
    assert (in_engine.tolist(), done.tolist()) == ([1, 2], [0])
    assert [a.tolist() for a in plan.offers.take_back(np.arange(6))] == [[], []]
    assert [plan.offers.attempts(i) for i in range(4)] == [1, 2, 1, 0]
    for _ in range(300):
        plan.offers.begin(5)
    assert plan.offers.attempts(5) == 255


def test_only_failures_count_against_a_row(tmp_path: Path) -> None:
    plan = write(tmp_path, [prompt(i, 20) for i in range(3)])
    replica = load_plan(plan.folder, "replica")
    for _ in range(3):  # of a death each
        replica.offers.begin(0)
        plan.offers.take_back(np.arange(3))
    for expected in (1, 2):
        replica.offers.begin(0)
        assert replica.offers.fail(0) == expected
    assert plan.offers.attempts(0) == 5
    assert [a.tolist() for a in plan.offers.take_back(np.arange(3))] == [[], []]
    replica.offers.begin(0)
    replica.offers.end(0, done=False)
    assert plan.commit(np.array([0]))
    plan.reopen(np.array([0]))
    assert plan.offers.attempts(0) == 6
    assert [replica.offers.fail(0) for _ in range(70)] == [*range(1, 64), *[63] * 7]
    assert plan.offers.attempts(0) == 6


def test_rows_that_are_apart_go_by_themselves(tmp_path: Path) -> None:
    plan = write(tmp_path, [prompt(i, 20) for i in range(6)])
    (shard,) = plan.shards
    plan.set_apart(np.array([1, 4]))
    assert plan.ordinals(shard).tolist() == [0, 2, 3, 5]
    assert [row.ordinal for row in plan.read(shard)] == [0, 2, 3, 5]
    assert [row.ordinal for row in plan.read(shard, {4})] == [4]
    assert plan.pending(shard)[0] == 4
    assert plan.commit(np.array([1]))
    assert not plan.commit(np.array([1]))


def test_rows_take_the_key_of_the_same_row_under_other_settings(tmp_path: Path) -> None:
    def key(identity: int, settings: int) -> bytes:
        return identity.to_bytes(8, "big") + settings.to_bytes(8, "big")

    # By identity and content: rows 0 and 1 are twice the same, 2 and 3 differ in identity, 5 is refused.
    whose = [1, 1, 2, 3, 4, 5, 6, 7]
    rows = [refused(i) if i == 5 else prompt(i, 20, key(who, 100 + i)) for i, who in enumerate(whose)]
    plan = write(tmp_path, rows)
    plan.commit(np.array([4]))
    old = [
        *((key(1, 7), 0), (key(1, 8), 0), (key(1, 9), 0)),  # one more than there are rows
        (key(3, 7), 1),
        (key(2, 7), 9),  # another content
        (key(4, 7), 2),  # done under the new settings
        (key(7, 107), 3),  # known already
        (key(9, 9), 1),
    ]
    keys, contents = np.array([k for k, _ in old], "S16"), np.array([c for _, c in old], np.uint64)
    assert plan.contents_of(np.array([0, 7])).tolist() == [1000, 1007]
    assert plan.adopt(keys, contents) == 3
    for one in (plan, load_plan(plan.folder, "driver", check=True)):
        assert one.lookup(keys).tolist() == [0, 1, -1, 3, -1, -1, 7, -1]
        assert one.keys_of(np.array([2, 4, 6])) == [key(2, 102), key(4, 104), key(6, 106)]


@pytest.mark.parametrize(
    "name", ["plan.json", "keys.bin", "sorted.bin", "contents.bin", "bucket-00.arrow", "bucket-00.rows"]
)
def test_a_bit_that_turned_is_noticed(tmp_path: Path, name: str) -> None:
    write(tmp_path, [prompt(i, 3) for i in range(5)])
    path = tmp_path / "plan" / name
    held = bytearray(path.read_bytes())
    held[len(held) // 2] ^= 1
    path.write_bytes(held)
    with pytest.raises(ValueError, match=r"is not what was written"):
        load_plan(tmp_path / "plan", check=True)


def test_what_a_state_file_says_is_not_believed(tmp_path: Path) -> None:
    plan = write(tmp_path, [refused(i) if i % 2 else prompt(i, 3) for i in range(6)])
    plan.state[:] = [1, 0, 2, 3, 7, 9]
    plan.forget_commits()
    assert plan.state.tolist() == [0, 1] * 3


def test_shards_go_in_the_order_that_is_asked_for(tmp_path: Path) -> None:
    asked: list[list[int]] = []

    def shortest_first(prompts: Any, budgets: Any, largest: Any) -> Any:
        asked.extend((prompts.tolist(), budgets.tolist(), largest.tolist()))
        return np.argsort(prompts, kind="stable")

    writer = PlanWriter(tmp_path / "plan", bucket_edges(None, 4096))
    rows = [prompt(i, 20 + 500 * (i % 2), max_tokens=5) for i in range(40)]
    writer.add(rows, [(0, 0)] * len(rows))
    plan = writer.finish({"made_from": "test"}, 10, 1, shortest_first)
    assert asked == [[5200, 5200, 200, 200], [50, 50, 50, 50], [5, 5, 5, 5]]
    assert [shard.shard for shard in plan.shards] == [0, 1, 2, 3]
    assert [shard.prompt_tokens for shard in plan.shards] == [200, 200, 5200, 5200]
    assert sorted(row.ordinal for shard in plan.shards for row in plan.read(shard)) == list(range(40))


def documents(count: int, questions: int, tokens: int, seed: int = 11) -> list[list[int]]:
    """Prompts of `questions` about each of `count` documents of so many tokens, in no order."""
    rng = np.random.default_rng(seed)
    bodies = [rng.integers(0, 50_000, tokens).tolist() for _ in range(count)]
    return [
        bodies[i] + rng.integers(0, 50_000, 20).tolist()
        for i in rng.permutation(np.repeat(np.arange(count), questions))
    ]


def write_prompts(folder: Path, prompts: list[list[int]], target_rows: int | None = 100) -> Plan:
    rows = [Prompt(i, i.to_bytes(16, "big"), tokens, 10, "{}") for i, tokens in enumerate(prompts)]
    return write(folder, list(rows), target_rows)


def pieces(values: Sequence[object]) -> int:
    return 1 + sum(a != b for a, b in pairwise(values))


def test_rows_that_begin_alike_stand_together_where_they_were_far_apart(tmp_path: Path) -> None:
    prompts = documents(100, 8, 400)
    plan = write_prompts(tmp_path, prompts)
    rows = [row for shard in sorted(plan.shards, key=lambda s: s.first) for row in plan.read(shard)]
    assert sorted(row.ordinal for row in rows) == list(range(800))
    assert all(row.tokens.tolist() == prompts[row.ordinal] for row in rows)
    assert pieces([tuple(row.tokens[:400]) for row in rows]) == 100
    # By the first row of each document, and in a document as in the input.
    firsts = [row.ordinal for row in rows[::8]]
    assert firsts == sorted(firsts)
    assert all(a.ordinal < b.ordinal for a, b in pairwise(rows) if a.group == b.group)
    assert {row.shared_tokens for row in rows} == {384}
    assert len({row.group for row in rows}) == 100


@pytest.mark.parametrize("prompts", [documents(8, 100, 100), documents(400, 1, 400), documents(40, 3, 400)])
def test_rows_stay_as_they_came_where_a_cache_finds_their_beginnings_anyway(
    tmp_path: Path, prompts: list[list[int]]
) -> None:
    plan = write_prompts(tmp_path, prompts)
    rows = [row for shard in sorted(plan.shards, key=lambda s: s.first) for row in plan.read(shard)]
    assert [row.ordinal for row in rows] == list(range(len(prompts)))
    assert all((row.group >= 0) == (row.shared_tokens > 0) for row in rows)


def test_a_group_shares_its_longest_common_beginning_and_whoever_shares_less_is_of_another(tmp_path: Path) -> None:
    common, document = list(range(64)), list(range(1000, 1100))
    prompts = [
        common + [7] * 40,
        common + document + [8] * 9,
        [5] * 90,
        common + document + [9] * 9,
        [6] * 16,
        [6] * 16,
    ]
    plan = write_prompts(tmp_path, prompts, target_rows=None)
    rows = {row.ordinal: row for shard in plan.shards for row in plan.read(shard)}
    # The first one is alone in its bucket; of the last two one is enough for both, and the other follows.
    assert [rows[i].shared_tokens for i in (0, 1, 2, 3, 4, 5)] == [0, 160, 0, 160, 0, 0]
    assert rows[1].group == rows[3].group >= 0
    assert rows[0].group == rows[2].group == rows[4].group == -1


def test_any_grouping_is_that_of_a_radix_tree() -> None:
    rng = np.random.default_rng(5)
    for trial in range(60):
        # Prompts over two tokens, in stretches of 16, so that they share a lot.
        prompts = [
            np.repeat(rng.integers(0, 2, rng.integers(1, 9)), 16)[: -int(rng.integers(1, 9))].astype(np.int32)
            for _ in range(int(rng.integers(1, 40)))
        ]
        lengths = prefix_lengths(128)
        offsets = np.cumsum([0, *map(len, prompts)]).astype(np.int32)
        hashed = PromptHashes.of(np.concatenate(prompts), offsets)
        sent = rng.random(len(prompts)) < (1.0 if trial % 2 else 0.8)
        found = Grouping.of(prefix_hashes(hashed, lengths), lengths, hashed.lengths.astype(np.int32), sent)

        def begins(row: int, length: int, prompts: list[Any] = prompts) -> tuple[int, ...] | None:
            return tuple(prompts[row][:length].tolist()) if len(prompts[row]) > length else None

        def place(row: int, sent: Any = sent, lengths: list[int] = lengths, begins: Any = begins) -> list[int]:
            """The first row that is like it up to each length, itself where there is none."""
            firsts = []
            for length in lengths:
                own = begins(row, length) if sent[row] else None
                alike = [i for i in range(row) if own is not None and sent[i] and begins(i, length) == own]
                firsts.append(min(alike, default=row))
            return [*firsts, row]

        assert found.order.tolist() == sorted(range(len(prompts)), key=place)
        for row in range(len(prompts)):
            shared = [
                length
                for length in lengths
                if sent[row]
                and begins(row, length) is not None
                and any(i != row and sent[i] and begins(i, length) == begins(row, length) for i in range(len(prompts)))
            ]
            assert found.shared_tokens[row] == max(shared, default=0)
            same = [i for i in range(len(prompts)) if found.group[i] == found.group[row] >= 0]
            assert (found.group[row] >= 0) == bool(shared)
            assert {(int(found.shared_tokens[i]), begins(i, max(shared))) for i in same} <= (
                {(max(shared), begins(row, max(shared)))} if shared else set()
            )


def test_a_file_larger_than_memory_is_put_in_order_by_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regroup, "_PIECE_TOKENS", 10_000)
    monkeypatch.setattr(regroup, "_DEALT_ROWS", 8)
    prompts = documents(150, 8, 400)
    plan = write_prompts(tmp_path, prompts)
    rows = [row for shard in sorted(plan.shards, key=lambda s: s.first) for row in plan.read(shard)]
    assert all(row.tokens.tolist() == prompts[row.ordinal] for row in rows)
    assert len(rows) == 1200
    assert pieces([tuple(row.tokens[:400]) for row in rows]) == 150
    assert sum(len(batch) for batch in plan.batches()) == 1200
    assert not list(plan.folder.glob("piece-*"))
    assert not list(plan.folder.glob("*.prefixes"))


def test_a_shard_is_read_in_the_order_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = write(tmp_path, [prompt(i, int(RNG.integers(200, 250))) for i in range(3000)], target_rows=3000)
    (shard,) = plan.shards

    def longest_first(rows: np.ndarray) -> np.ndarray:
        return np.argsort(-rows["prompt_tokens"], kind="stable")

    rows = list(plan.read(shard, in_order=longest_first))
    lengths = [len(row.tokens) for row in rows]
    assert lengths == sorted(lengths, reverse=True)
    assert all(row.key == row.ordinal.to_bytes(16, "big") for row in rows)
    # Where a shard is too large for that, a part of it after the other.
    monkeypatch.setattr(planned, "_WINDOW_TOKENS", 1)
    parts = list(plan.read(shard, in_order=longest_first))
    assert sorted(row.ordinal for row in parts) == list(range(3000))
    assert [row.ordinal // 1024 for row in parts] == sorted(row.ordinal // 1024 for row in parts)
    assert {row.ordinal for row in plan.read(shard, {5, 2900, 7}, longest_first)} == {5, 7, 2900}


def test_a_plan_of_another_layout_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = write(tmp_path, [prompt(0, 5)])
    monkeypatch.setattr(planned, "LAYOUT", planned.LAYOUT + 1)
    assert find_plan(plan.folder) is None
