"""Answers of other runs: from the job's cache, and from earlier outputs."""

import errno
import json
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkgen.errors import OutputError, SpecError, Stopped
from bulkgen.known import KnownAnswers
from bulkgen.known.cache import AnswerCache
from bulkgen.spec import load_spec
from tests.harness import Job, bulkgen

MakeJob = Callable[..., Job]
GREEDY = {"temperature": 0, "max_tokens": 8}
# Several answers to a row, which are the same each time since the row has a seed.
SEVERAL = {"temperature": 0.7, "seed": {"column": "seed"}, "n": 3, "logprobs": 2, "max_tokens": 8}


def asked(first: int, last: int) -> list[dict[str, Any]]:
    return [{"id": i, "prompt": f"question number {i}"} for i in range(first, last)]


def seeded(first: int, last: int) -> list[dict[str, Any]]:
    return [row | {"seed": 7} for row in asked(first, last)]


def sources(job: Job) -> Counter[str]:
    return Counter(row["answer_from"] for row in job.rows())


def whole(job: Job) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(bulkgen("report", str(job.output), "--json").out)["whole"]
    return report


def assert_right(job: Job, ids: range) -> None:
    assert [row["id"] for row in job.rows()] == list(ids)
    assert all((row["status"], row["text"]) == ("done", f"echo:{row['prompt']}") for row in job.rows())
    assert len(set(job.committed_keys())) == len(job.committed_keys()) == len(ids)


@pytest.fixture
def make_cached(make_job: MakeJob, tmp_path: Path) -> Callable[..., Job]:
    def make(rows: list[dict[str, Any]], **spec: Any) -> Job:
        cache = {"path": str(tmp_path / "answers.cache")} | spec.pop("cache", {})
        return make_job(rows, sampling=spec.pop("sampling", GREEDY), cache=cache, **spec)

    return make


class TestCacheOverRuns:
    def test_only_what_is_new_is_generated(self, make_cached: MakeJob) -> None:
        first, second = make_cached(asked(0, 40)), make_cached(asked(30, 60))
        assert first.run().code == 0
        assert sources(first) == {"engine": 40}
        ended = second.run()
        assert ended.code == 0, ended.err
        assert_right(second, range(30, 60))
        assert sources(second) == {"cache": 10, "engine": 20}
        reused = [row for row in second.rows() if row["answer_from"] == "cache"]
        assert {(row["attempts"], row["e2e_s"], row["cached_tokens"]) for row in reused} == {(0, None, None)}
        report = whole(second)
        assert (report["done"], report["reused"], report["repeated"]) == (30, 10, 0)
        for name in ("prompt_tokens", "output_tokens"):
            assert report[f"spared_{name}"] == sum(row[name] for row in reused) > 0
            assert report[name] == report[f"engine_{name}"]
        assert "10 rows are done with answers that were known before" in ended.err

    def test_a_job_that_knows_all_answers_starts_no_engine(self, make_cached: MakeJob) -> None:
        first, second = make_cached(asked(0, 20)), make_cached(asked(0, 20) + asked(0, 20))
        assert first.run().code == 0
        assert second.run().code == 0
        assert sources(second) == {"cache": 40}
        assert not second.manifest("ready")
        assert [row["text"] for row in second.rows()] == [row["text"] for row in first.rows()] * 2

    def test_all_of_an_answer_comes_back(self, make_cached: MakeJob) -> None:
        first, second = (make_cached(seeded(0, 12), sampling=SEVERAL) for _ in range(2))
        assert (first.run().code, second.run().code) == (0, 0)
        names = ("text", "samples", "logprobs", "finish_reason", "prompt_tokens", "output_tokens", "warnings", "valid")
        told = [[{name: row.get(name) for name in names} for row in job.rows()] for job in (first, second)]
        assert told[0] == told[1]
        assert told[0][0]["samples"]
        assert sources(second) == {"cache": 12}
        assert whole(second)["answers"] == 36

    @pytest.mark.parametrize(
        "spec",
        [
            {"sampling": GREEDY | {"temperature": 0.5}},
            {"sampling": GREEDY | {"max_tokens": 7}},
            {"sampling": GREEDY | {"temperature": 0.5, "seed": 3}},
            {"engine": {"stub": {"seed": 1}}},
            {"engine": {"dtype": "float32"}},
            {"engine": {"args": {"load_format": "dummy"}}},
            {"engine": {"max_model_len": 512}},
            {"input": {"system": "Be brief."}},
        ],
        ids=[
            "drawn anew",
            "another budget",
            "a seed for each row",
            "another model",
            "another type",
            "weights made up",
            "another length",
            "another prompt",
        ],
    )
    def test_another_request_has_another_answer(self, make_cached: MakeJob, spec: dict[str, Any]) -> None:
        first, second = make_cached(asked(0, 10)), make_cached(asked(0, 10), **spec)
        assert (first.run().code, second.run().code) == (0, 0)
        assert sources(second) == {"engine": 10}

    def test_how_the_engine_computes_makes_no_other_answer(self, make_cached: MakeJob) -> None:
        first = make_cached(asked(0, 10))
        second = make_cached(asked(0, 10), engine={"max_num_seqs": 2, "args": {"async_scheduling": False}})
        assert (first.run().code, second.run().code) == (0, 0)
        assert sources(second) == {"cache": 10}

    def test_what_is_asked_once_more_is_not_taken_from_it(self, make_cached: MakeJob) -> None:
        job = make_cached(asked(0, 30), sampling=GREEDY | {"max_tokens": 2})
        assert job.run().code == 0
        cut = sum(row["finish_reason"] == "length" for row in job.rows())
        assert cut > 0
        assert job.run("--retry", "truncated").code == 0
        assert sources(job) == {"engine": 30}
        assert len(job.committed_keys()) == 30 + cut

    def test_nor_are_rows_that_ask_the_same_as_one_of_those(self, make_cached: MakeJob) -> None:
        """Else a row could follow one that is done with the answer that is not wanted, and nobody would do it."""
        job = make_cached(asked(0, 6), sampling=GREEDY | {"max_tokens": 2})
        assert job.run().code == 0
        job.write([row | {"id": row["id"] + 100} for row in asked(0, 6)] + asked(0, 6))
        ended = job.run("--retry", "truncated", "--for", "20s")
        assert ended.code == 0, ended.err
        assert len(job.rows()) == 12
        assert {row["answer_from"] for row in job.rows() if row["finish_reason"] == "length"} == {"engine", "repeat"}

    def test_failed_rows_are_not_kept(self, make_cached: MakeJob) -> None:
        first = make_cached(asked(0, 12), engine={"stub": {"poison": ["number 3"]}})
        second = make_cached(asked(0, 12))
        assert first.run().code == 3
        assert second.run().code == 0
        assert sources(second) == {"cache": 11, "engine": 1}
        assert_right(second, range(12))

    def test_they_say_nothing_for_an_engine_that_dies(self, make_cached: MakeJob) -> None:
        """Other engines gave them: that this one does no row at all need not lie in the row that is left."""
        first = make_cached(asked(0, 9))
        second = make_cached(asked(0, 10), engine={"stub": {"poison": ["question"]}, "max_restarts": 1})
        assert first.run().code == 0
        ended = second.run()
        assert ended.code == 4, ended.err
        assert not [part for part in second.manifest("part") if part["failed"]]

    def test_what_a_killed_run_had_done_is_kept_by_the_next_start(self, make_cached: MakeJob) -> None:
        first = make_cached(asked(0, 40), engine={"stub": {"die_at": [15] * 9}, "max_restarts": 0})
        assert first.run().code != 0
        first.path.write_text(first.path.read_text().replace("die_at", "hang_at").replace("15", "1000"))
        assert first.run().code == 0
        second = make_cached(asked(0, 40))
        assert second.run().code == 0
        assert sources(second) == {"cache": 40}


class TestBadCaches:
    def test_a_file_that_is_something_else_is_never_touched(self, make_cached: MakeJob, tmp_path: Path) -> None:
        for content in (b"my own notes", None):
            other = tmp_path / "answers.cache"
            other.unlink(missing_ok=True)
            if content is None:
                with sqlite3.connect(other) as db:
                    db.execute("CREATE TABLE mine (x)")
                db.close()
            else:
                other.write_bytes(content)
            before = other.read_bytes()
            for command in ("run", "plan"):
                job = make_cached(asked(0, 3))
                ended = bulkgen(command, str(job.path))
                assert ended.code == 2, ended.err
                assert "is no answer cache of bulkgen" in ended.err
                assert not job.run_folder.exists()
            assert other.read_bytes() == before

    @pytest.mark.parametrize("place", ["out.parquet", "out.parquet.bulkgen/cache", "out.parquet.bulkgen"])
    def test_one_in_the_place_of_the_output(self, make_cached: MakeJob, place: str) -> None:
        ended = make_cached(asked(0, 3), cache={"path": place}).run()
        assert ended.code == 2
        assert "is a place of the output" in ended.err

    def test_a_damaged_one_costs_time_only(self, make_cached: MakeJob, tmp_path: Path) -> None:
        first, second = make_cached(asked(0, 400)), make_cached(asked(0, 400))
        assert first.run().code == 0
        path = tmp_path / "answers.cache"
        data = bytearray(path.read_bytes())
        data[8192:-4096] = b"\xff" * (len(data) - 12288)
        path.write_bytes(data)
        ended = second.run()
        assert ended.code == 0, ended.err
        assert_right(second, range(400))

    def test_one_that_cannot_be_written(self, make_cached: MakeJob, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        job = make_cached(asked(0, 5), cache={"path": str(tmp_path / "file" / "cache")})
        ended = job.run()
        assert ended.code == 0
        assert "the answer cache cannot be used" in ended.err
        assert_right(job, range(5))

    def test_what_it_could_not_take_comes_later(self, make_cached: MakeJob, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        job = make_cached(asked(0, 5), cache={"path": str(tmp_path / "file" / "cache")})
        assert job.run().code == 0
        (tmp_path / "file").unlink()
        (job.folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked(0, 7)))
        assert job.run().code == 0
        later = make_cached(asked(0, 7), cache={"path": str(tmp_path / "file" / "cache")})
        assert later.run().code == 0
        assert sources(later) == {"cache": 7}

    def test_one_that_became_another_versions_meanwhile(self, make_cached: MakeJob, tmp_path: Path) -> None:
        """What is found out about a cache once engines work ends no run."""
        self.remake(tmp_path / "answers.cache")
        said: list[str] = []
        known = KnownAnswers(load_spec(make_cached(asked(0, 5)).path), said.append)
        assert not known.remember([], lambda: None)
        assert "another version" in said[0]
        job = make_cached(asked(0, 5), engine={"stub": {"start_s": 3}})
        (tmp_path / "answers.cache").unlink()
        run = job.start()
        while not job.run_folder.exists() or not job.manifest("plan"):
            time.sleep(0.02)
        self.remake(tmp_path / "answers.cache")
        said_by_run = run.communicate(timeout=60)[0]
        assert run.returncode == 0, said_by_run
        assert "another version" in said_by_run
        assert_right(job, range(5))

    def remake(self, path: Path) -> None:
        AnswerCache(path, 1 << 20, private=True).close()
        with sqlite3.connect(path) as db:
            db.execute("PRAGMA user_version = 99")
        db.close()

    def test_a_place_that_the_system_does_not_know(self, make_cached: MakeJob) -> None:
        job = make_cached(asked(0, 5), cache={"path": "c" * 300}, reuse=["r" * 300])
        ended = job.run()
        assert ended.code == 0, ended.err
        assert "the answer cache cannot be used (File name too long)" in ended.err
        assert f"{'r' * 300}: cannot be read (File name too long)" in ended.err
        assert_right(job, range(5))

    def test_one_that_was_removed_is_filled_anew(self, make_cached: MakeJob, tmp_path: Path) -> None:
        job = make_cached(asked(0, 5))
        assert job.run().code == 0
        (tmp_path / "answers.cache").unlink()
        job.write(asked(0, 7))
        assert job.run().code == 0
        later = make_cached(asked(0, 7))
        assert later.run().code == 0
        assert sources(later) == {"cache": 7}

    def test_looking_into_it_makes_none(self, make_cached: MakeJob, tmp_path: Path) -> None:
        job = make_cached(asked(0, 5))
        assert bulkgen("plan", str(job.path)).code == 0
        assert not (tmp_path / "answers.cache").exists()


class TestAnswerCache:
    def cache(self, path: Path, most: int = 1 << 30) -> AnswerCache:
        return AnswerCache(path, most, private=True)

    def found(self, cache: AnswerCache, numbers: range) -> set[int]:
        keys = {number.to_bytes(16, "big"): number for number in numbers}
        return {keys[key] for some in cache.find(keys) for key in some}

    def answers(self, numbers: range, text: str = "x" * 100) -> list[tuple[bytes, dict[str, Any]]]:
        return [(number.to_bytes(16, "big"), {"text": f"{number} {text}"}) for number in numbers]

    def test_the_last_answer_to_a_request_stays(self, tmp_path: Path) -> None:
        cache = self.cache(tmp_path / "c")
        cache.put([(b"k" * 16, {"text": "old"}), (b"k" * 16, {"text": "new"})])
        assert list(cache.find([b"k" * 16])) == [{b"k" * 16: {"text": "new"}}]

    def test_it_is_for_its_owner_alone(self, tmp_path: Path) -> None:
        self.cache(tmp_path / "c")
        assert (tmp_path / "c").stat().st_mode & 0o077 == 0

    def test_that_others_may_look_into_is_closed_to_them(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        AnswerCache(tmp_path / "c", 1 << 20, private=False).close()
        (tmp_path / "c").chmod(0o664)
        AnswerCache(tmp_path / "c", 1 << 20, private=False).close()
        assert (tmp_path / "c").stat().st_mode & 0o777 == 0o664
        self.cache(tmp_path / "c").put(self.answers(range(1)))
        assert (tmp_path / "c").stat().st_mode & 0o777 == 0o600
        # Another's cache, which only they could close, is read all the same.
        (tmp_path / "c").chmod(0o644)
        monkeypatch.setattr(Path, "chmod", Mock(side_effect=PermissionError(errno.EPERM, "not yours")))
        assert self.found(self.cache(tmp_path / "c"), range(2)) == {0}
        with pytest.raises(OutputError, match="others may look into"):
            self.cache(tmp_path / "c").put(self.answers(range(1, 2)))
        assert self.found(self.cache(tmp_path / "c"), range(2)) == {0}

    def test_damage_serves_no_other_answer(self, tmp_path: Path) -> None:
        """SQLite keeps no checksums: an index that points to another row is as good as a whole one to it."""
        cache = self.cache(tmp_path / "c")
        cache.put(self.answers(range(10)))
        with sqlite3.connect(tmp_path / "c") as db:
            db.execute("UPDATE answers SET answer = (SELECT answer FROM answers WHERE substr(key, -1) = x'07')")
            db.execute("UPDATE answers SET answer = 'text', used = 'now' WHERE substr(key, -1) = x'03'")
            db.execute("UPDATE answers SET answer = 7, used = x'00' WHERE substr(key, -1) = x'04'")
        db.close()
        assert self.found(cache, range(10)) == {7}

    def test_damage_that_sqlite_quotes(self, tmp_path: Path) -> None:
        self.cache(tmp_path / "c").close()
        data = (tmp_path / "c").read_bytes()
        (tmp_path / "c").write_bytes(data.replace(b"used DESC", b"used DES\xff"))
        with pytest.raises(OutputError, match="cannot be used"):
            self.found(self.cache(tmp_path / "c"), range(1))

    def test_it_never_holds_more_than_it_may(self, tmp_path: Path) -> None:
        """Else a killed run would leave it as large as it had become, and a large one would fill the disk."""
        cache = self.cache(tmp_path / "c", 1_000_000)
        largest = 0

        def watched() -> Iterator[tuple[bytes, dict[str, Any]]]:
            nonlocal largest
            for answer in self.answers(range(30_000)):
                largest = max(largest, (tmp_path / "c").stat().st_size)
                yield answer

        cache.put(watched())
        assert largest < 2_000_000
        assert 4000 < len(self.found(cache, range(30_000))) < 8000

    def test_what_cannot_be_written_holds_nobody_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A use that cannot be noted is not noted: no others wait for it, and it is not tried over and over."""
        monkeypatch.setattr("bulkgen.known.cache._PATIENCE_S", 0.5)
        cache = self.cache(tmp_path / "c")
        cache.put(self.answers(range(3000)))
        with closing(sqlite3.connect(tmp_path / "c", isolation_level=None)) as other:
            other.execute("UPDATE answers SET used = 0")
            reading = other.execute("SELECT key FROM answers")
            reading.fetchone()
            began = time.monotonic()
            assert len(self.found(cache, range(3000))) == 3000
            assert time.monotonic() - began < 2
            reading.close()
        third = self.cache(tmp_path / "c")
        third.put(self.answers(range(3000, 3001)))

    def test_those_not_used_for_longest_go_first(self, tmp_path: Path) -> None:
        cache = self.cache(tmp_path / "c", 20_000)
        self.cache(tmp_path / "c").put(self.answers(range(1000)))
        with sqlite3.connect(tmp_path / "c") as db:
            db.execute("UPDATE answers SET used = used - 100000")
        db.close()
        assert self.found(cache, range(20)) == set(range(20))
        cache.put([])
        left = self.found(cache, range(1000))
        assert set(range(20)) <= left
        assert 60 < len(left) < 200

    def test_it_gives_room_back(self, tmp_path: Path) -> None:
        self.cache(tmp_path / "c").put(self.answers(range(5000)))
        large = (tmp_path / "c").stat().st_size
        self.cache(tmp_path / "c", 50_000).put([])
        assert (tmp_path / "c").stat().st_size < large / 4

    def test_many_write_and_read_at_once(self, tmp_path: Path) -> None:
        def work(worker: int) -> int:
            cache = self.cache(tmp_path / "c")
            for turn in range(5):
                cache.put(self.answers(range(worker * 1000 + turn * 100, worker * 1000 + turn * 100 + 150)))
                assert self.found(cache, range(worker * 1000, worker * 1000 + 100)) == set(
                    range(worker * 1000, worker * 1000 + 100)
                )
            cache.close()
            return worker

        with ThreadPoolExecutor(6) as pool:
            assert sorted(pool.map(work, range(6))) == list(range(6))
        assert len(self.found(self.cache(tmp_path / "c"), range(6000))) == 6 * 550

    def test_another_version_is_told(self, tmp_path: Path) -> None:
        self.cache(tmp_path / "c").close()
        with sqlite3.connect(tmp_path / "c") as db:
            db.execute("PRAGMA user_version = 99")
        db.close()
        with pytest.raises(SpecError, match="another version"):
            self.cache(tmp_path / "c")

    def test_a_folder_in_its_place(self, tmp_path: Path) -> None:
        with pytest.raises(OutputError, match="cannot be used"):
            self.cache(tmp_path)


class TestReuse:
    @pytest.mark.parametrize("output", ["out.parquet", "out/"])
    def test_yesterdays_output(self, make_job: MakeJob, output: str) -> None:
        first = make_job(asked(0, 25), sampling=GREEDY, output={"path": output, "column": "answer", "file_rows": 10})
        second = make_job(asked(20, 40), sampling=GREEDY, reuse=[str(first.output)])
        assert first.run().code == 0
        ended = second.run()
        assert ended.code == 0, ended.err
        assert_right(second, range(20, 40))
        assert sources(second) == {"reuse": 5, "engine": 15}
        third = make_job(asked(15, 45), sampling=GREEDY, reuse=[str(second.output), str(first.output)])
        assert third.run().code == 0
        assert_right(third, range(15, 45))
        assert sources(third) == {"reuse": 25, "engine": 5}

    def test_its_answers_enter_the_cache(self, make_job: MakeJob, make_cached: MakeJob) -> None:
        first = make_job(asked(0, 10), sampling=GREEDY)
        assert first.run().code == 0
        second = make_cached(asked(0, 12), reuse=[str(first.output)])
        assert second.run().code == 0
        third = make_cached(asked(0, 12))
        assert third.run().code == 0
        assert (sources(second), sources(third)) == ({"reuse": 10, "engine": 2}, {"cache": 12})

    def test_all_of_an_answer_comes_back(self, make_job: MakeJob) -> None:
        first = make_job(seeded(0, 8), sampling=SEVERAL)
        second = make_job(seeded(0, 8), sampling=SEVERAL, reuse=[str(first.output)])
        assert (first.run().code, second.run().code) == (0, 0)
        names = ("text", "samples", "logprobs", "finish_reason", "prompt_tokens", "output_tokens", "warnings")
        assert [[r[n] for n in names] for r in first.rows()] == [[r[n] for n in names] for r in second.rows()]
        assert whole(second)["answers"] == 24

    def test_columns_of_the_input_are_no_part_of_an_answer(self, make_job: MakeJob) -> None:
        """They may have names that a result has in other jobs, or has only on the way."""
        own = {"answers": [4], "valid": True, "samples": ["a", "b"], "logprobs": "none"}
        first = make_job([row | own for row in asked(0, 6)], sampling=GREEDY)
        assert first.run().code == 0
        second = make_job(asked(0, 6), sampling=GREEDY, reuse=[str(first.output)])
        ended = second.run()
        assert ended.code == 0, ended.err
        assert sources(second) == {"reuse": 6}
        assert whole(second)["answers"] == 6
        part = pq.read_table(second.run_folder / "parts" / second.manifest("part")[0]["name"])
        assert {value for name in ("samples", "logprobs", "valid") for value in part[name].to_pylist()} == {None}

    def test_written_once_more_by_something_else(self, make_job: MakeJob, tmp_path: Path) -> None:
        first = make_job(seeded(0, 6), sampling=SEVERAL)
        assert first.run().code == 0
        edited = tmp_path / "edited.parquet"
        pl.read_parquet(first.output).with_columns(pl.col("status").cast(pl.Categorical)).write_parquet(edited)
        second = make_job(seeded(0, 6), sampling=SEVERAL, reuse=[str(edited)])
        assert second.run().code == 0
        assert sources(second) == {"reuse": 6}
        names = ("text", "samples", "logprobs", "finish_reason", "prompt_tokens", "output_tokens", "warnings")
        assert [[r[n] for n in names] for r in first.rows()] == [[r[n] for n in names] for r in second.rows()]

    @pytest.mark.parametrize("keys", [pa.array(range(6)), pa.array([b"\xff" * 32] * 6), pa.array([[1]] * 6)])
    def test_keys_that_are_no_texts(self, make_job: MakeJob, tmp_path: Path, keys: pa.Array) -> None:
        first = make_job(asked(0, 6), sampling=GREEDY)
        assert first.run().code == 0
        table, edited = pq.read_table(first.output), tmp_path / "edited.parquet"
        pq.write_table(table.set_column(table.column_names.index("request_key"), "request_key", keys), edited)
        second = make_job(asked(0, 6), sampling=GREEDY, reuse=[str(edited)])
        ended = second.run()
        assert ended.code == 0, ended.err
        assert sources(second) == {"engine": 6}

    def test_one_that_is_not_there_or_no_output(self, make_job: MakeJob, tmp_path: Path) -> None:
        foreign, broken = tmp_path / "foreign.parquet", tmp_path / "broken.parquet"
        pq.write_table(pa.table({"text": ["a"]}), foreign)
        broken.write_bytes(b"PAR1 and nothing more")
        job = make_job(asked(0, 5), sampling=GREEDY, reuse=["gone.parquet", str(foreign), str(broken)])
        ended = job.run()
        assert ended.code == 0
        for said in ("gone.parquet: no output there", "have no request keys", "broken.parquet: cannot be read"):
            assert said in ended.err
        assert_right(job, range(5))

    def test_a_cell_that_is_no_key_is_no_answer(self, make_job: MakeJob, tmp_path: Path) -> None:
        first = make_job(asked(0, 6), sampling=GREEDY)
        assert first.run().code == 0
        table = pq.read_table(first.output)
        keys = table["request_key"].to_pylist()
        bad = pa.array(["", "z" * 32, "ä" * 32, None, keys[4], keys[5].upper()], pa.string())
        edited = tmp_path / "edited.parquet"
        pq.write_table(table.set_column(table.column_names.index("request_key"), "request_key", bad), edited)
        second = make_job(asked(0, 6), sampling=GREEDY, reuse=[str(edited)])
        ended = second.run()
        assert ended.code == 0, ended.err
        assert_right(second, range(6))
        assert sources(second) == {"engine": 4, "reuse": 2}


@pytest.mark.parametrize("source", ["cache", "reuse"])
def test_a_search_that_finds_nothing_can_be_stopped(make_cached: MakeJob, tmp_path: Path, source: str) -> None:
    first = make_cached(asked(0, 10))
    assert first.run().code == 0
    second = make_cached(asked(20, 30), reuse=[str(first.output)] if source == "reuse" else [])
    if source == "reuse":
        (tmp_path / "answers.cache").unlink()
    keys = np.array([bytes([number]) * 16 for number in range(10)])
    plan = Mock(pending_requests=lambda: (np.arange(10), np.zeros(10, np.int32), keys))
    known = KnownAnswers(load_spec(second.path), print)
    with pytest.raises(Stopped):
        list(known.answer(plan, np.empty(0, np.int64), "", Mock(side_effect=Stopped("stopped"))))


def test_plan_leaves_out_what_is_known(make_cached: MakeJob) -> None:
    first, second = make_cached(asked(0, 30)), make_cached(asked(20, 50) + asked(20, 50))
    assert first.run().code == 0
    told = json.loads(bulkgen("plan", str(second.path), "--json").out)
    assert (told["rows"], told["sent"], told["reused"]) == (60, 20, 20)
    page = bulkgen("plan", str(second.path)).out
    assert "60 rows, 20 of them sent to the engine" in page
    assert "20 rows have an answer in the cache or an earlier output" in page
