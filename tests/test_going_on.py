"""Going on with a run whose settings changed, doing rows once more, and stopping a job that is plainly wrong."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bulkgen import __version__
from bulkgen.errors import SpecError
from bulkgen.limits import FailureLimit
from bulkgen.replica import row_seed
from tests.harness import Job, bulkgen, model_folder, prompts

MakeJob = Callable[..., Job]


def whole(job: Job) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(bulkgen("report", str(job.output), "--json").out)["whole"]
    return report


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("input.template=T {{ prompt }}", ["input.template was null", "T {{ prompt }}"]),
        ("sampling.temperature=0.7", ["sampling.temperature was 1.0 and is 0.7"]),
        ("sampling.max_tokens=9", ["sampling.max_tokens was 8 and is 9"]),
        ("sampling.stop=END", ["sampling.stop was null", "END"]),
        ("input.id=null", ["input.id"]),
    ],
)
def test_56_changed_settings_need_a_choice(make_job: MakeJob, override: str, words: list[str]) -> None:
    job = make_job(prompts(20))
    job.run()
    before = job.output.read_bytes(), (job.run_folder / "manifest.jsonl").read_bytes()
    sets = ["--set", override] + (["--set", "input.prompt=null"] if "template" in override else [])
    ended = job.run(*sets)
    assert ended.code == 2
    assert all(word in ended.err for word in [*words, "--changed again", "--changed keep"])
    assert (job.output.read_bytes(), (job.run_folder / "manifest.jsonl").read_bytes()) == before
    if "input.id" not in override:
        assert job.run(*sets, "--changed", "keep").code == 0
        assert len(job.committed_keys()) == 20
    assert job.run(*sets, "--changed", "again").code == 0


def test_56_a_chat_template_edited_in_place(make_job: MakeJob) -> None:
    job = make_job(None, input={"chat_template": "chat.jinja"})
    (job.folder / "chat.jinja").write_text("{{ messages[0].content }}")
    job.write(prompts(5))
    assert job.run().code == 0
    (job.folder / "chat.jinja").write_text("{{ messages[0].content }}!")
    ended = job.run()
    assert ended.code == 2
    assert "input.chat_template was" in ended.err


def test_56_another_model_needs_a_choice(make_job: MakeJob) -> None:
    job = make_job(prompts(5), model="a", input={"chat": False}, engine={"max_model_len": 128})
    one, other = (model_folder(job.folder / name, None) for name in "ab")
    assert job.run().code == 0
    ended = job.run("--set", "model=b")
    assert ended.code == 2
    assert 'model was "a" and is "b"' in ended.err
    # The same name, other files.
    config = json.loads((other / "config.json").read_text())
    (one / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 256}))
    ended = job.run()
    assert ended.code == 2
    assert "model files was" in ended.err
    assert len(job.committed_keys()) == 5


def test_56_another_version_of_bulkgen_goes_on(make_job: MakeJob) -> None:
    engine = {"max_num_seqs": 2, "max_restarts": 0, "stub": {"step_s": 0.02, "die_at": [12]}}
    job = make_job(prompts(20), output={"commit_rows": 2}, engine=engine)
    older = "import bulkgen; bulkgen.__version__ = '0.0.1'; from bulkgen.cli import main; main()"
    begun = subprocess.run([sys.executable, "-c", older, "run", str(job.path)], capture_output=True, check=False)
    assert begun.returncode == 4
    before = job.committed_keys()
    assert before
    assert job.run("--set", "engine.stub.die_at=[]").code == 0
    assert [start["version"] for start in job.manifest("start")] == ["0.0.1", __version__]
    assert len(job.committed_keys()) == 20
    assert job.committed_keys()[: len(before)] == before


def test_56_what_makes_no_other_request_changes_nothing(make_job: MakeJob) -> None:
    job = make_job(prompts(20))
    job.run()
    text = job.path.read_text()
    job.path.write_text("# a comment\n" + text.replace("out.parquet", "./x/../out.parquet"))
    assert job.run("--set", "shards.target_rows=3", "--set", "output.commit_rows=2").code == 0
    assert len(job.committed_keys()) == 20


def test_kept_rows_keep_their_results_and_say_so(make_job: MakeJob) -> None:
    job = make_job(prompts(20))
    job.run()
    first = {row["id"]: (row["row_key"], row["settings_key"]) for row in job.rows()}
    job.write(prompts(30))
    assert job.run("--set", "sampling.max_tokens=20", "--changed", "keep").code == 0
    rows = job.rows()
    assert {row["id"]: (row["row_key"], row["settings_key"]) for row in rows[:20]} == first
    assert len({row["settings_key"] for row in rows}) == 2
    assert [row["id"] for row in rows] == [row["id"] for row in prompts(30)]
    assert len(job.committed_keys()) == 30
    # New rows later: still nothing of the old is done again.
    job.write(prompts(35))
    assert job.run("--set", "sampling.max_tokens=20").code == 0
    assert len(job.committed_keys()) == 35
    assert {row["id"]: (row["row_key"], row["settings_key"]) for row in job.rows()[:20]} == first
    assert whole(job)["rows"] == whole(job)["done"] == 35


def test_kept_and_then_generated_again_after_all(make_job: MakeJob) -> None:
    job = make_job(prompts(20))
    job.run()
    job.run("--set", "sampling.max_tokens=20", "--changed", "keep")
    assert job.run("--set", "sampling.max_tokens=30", "--changed", "again").code == 0
    assert len({row["settings_key"] for row in job.rows()}) == 1
    assert len(job.committed_keys()) == 40


def test_keeping_leaves_failed_rows_to_the_new_settings(make_job: MakeJob) -> None:
    job = make_job(prompts(40), engine={"stub": {"fail_rate": 0.5}})
    assert job.run().code == 3
    done = {row["id"]: row["row_key"] for row in job.rows() if row["status"] == "done"}
    more = ("--set", "sampling.max_tokens=9", "--set", "engine.stub.fail_rate=0")
    assert job.run(*more, "--changed", "keep").code == 0
    rows = {row["id"]: row["row_key"] for row in job.rows()}
    assert done.items() < rows.items()


def answers(job: Job) -> list[tuple[str, str]]:
    """Prompt and answer of each row."""
    return [(row["prompt"], row["text"]) for row in job.rows()]


def echoed(*texts: str) -> list[tuple[str, str]]:
    return [(text, f"echo:{text}") for text in texts]


NINE = ("--set", "sampling.max_tokens=9")
TEN = ("--set", "sampling.max_tokens=10")


def test_equal_ids_are_kept_each_with_its_own_answer(make_job: MakeJob) -> None:
    rows = [{"id": "same", "prompt": f"text {i % 4}"} for i in range(6)]
    job = make_job(rows, engine={"stub": {"shuffle": True}})
    job.run()
    assert job.run(*NINE, "--changed", "keep").code == 0
    assert len(job.committed_keys()) == 6
    assert len({row["row_key"] for row in job.rows()}) == 6
    assert answers(job) == echoed(*(row["prompt"] for row in rows))


@pytest.mark.parametrize("row_id", ["id", None])
def test_rows_that_changed_are_not_kept(make_job: MakeJob, row_id: str | None) -> None:
    job = make_job([{"id": i, "prompt": text} for i, text in enumerate(["a", "b", "c"])], input={"id": row_id})
    job.run()
    # With the settings, and in a later start.
    job.write([{"id": i, "prompt": text} for i, text in enumerate(["a", "B", "c"])])
    assert job.run(*NINE, "--changed", "keep").code == 0
    assert answers(job) == echoed("a", "B", "c")
    assert len(job.committed_keys()) == 4
    job.write([{"id": i, "prompt": text} for i, text in enumerate(["a", "B", "C"])])
    assert job.run(*NINE).code == 0
    assert answers(job) == echoed("a", "B", "C")
    assert len(job.committed_keys()) == 5
    # A row in front: without ids all the others are at another place.
    job.write([{"id": i, "prompt": text} for i, text in ((9, "new"), (0, "a"), (1, "B"), (2, "C"))])
    assert job.run(*NINE).code == 0
    assert answers(job) == echoed("new", "a", "B", "C")
    # What was kept and what was not is kept when settings change once more.
    done = len(job.committed_keys())
    assert job.run(*TEN, "--changed", "keep").code == 0
    assert answers(job) == echoed("new", "a", "B", "C")
    assert len(job.committed_keys()) == done


def test_rows_are_known_again_where_the_prompt_takes_other_columns(make_job: MakeJob) -> None:
    def rows(b: str, lang: str) -> list[dict[str, Any]]:
        return [{"id": 0, "prompt": "a", "lang": "en"}, {"id": 1, "prompt": b, "lang": lang}]

    job = make_job(rows("b", "en"))
    job.run()
    other = ("--set", "input.prompt=null", "--set", "input.template='{{ lang }} {{ prompt }}'")
    job.write(rows("b", "de"))  # no column that was in the prompt then
    assert job.run(*other, "--changed", "keep").code == 0
    assert [text for _, text in answers(job)] == ["echo:a", "echo:b"]
    job.write(rows("B", "de"))
    assert job.run(*other).code == 0
    assert [text for _, text in answers(job)] == ["echo:a", "echo:de B"]
    job.write(rows("B", "fr"))  # a column of the prompt that made this answer
    assert job.run(*other, *NINE, "--changed", "keep").code == 0
    assert [text for _, text in answers(job)] == ["echo:a", "echo:fr B"]


def test_nothing_is_kept_by_guesswork(make_job: MakeJob) -> None:
    job = make_job(prompts(5))
    job.run()
    (job.run_folder / "plan" / "plan.json").unlink()
    ended = job.run(*NINE, "--changed", "keep")
    assert ended.code == 6
    assert "run the job once with the settings as they were" in ended.err
    job.output.unlink()
    assert job.run().code == 0  # makes the plan again, generates nothing
    assert job.run(*NINE, "--changed", "keep").code == 0
    assert len(job.committed_keys()) == 5


def test_retry_does_what_is_named_and_nothing_else(make_job: MakeJob) -> None:
    job = make_job(prompts(60), engine={"stub": {"fail_rate": 0.3}})
    assert job.run().code == 3
    before = {row["id"]: row["row_key"] for row in job.rows()}
    failed = [row["id"] for row in job.rows() if row["status"] == "failed"]
    assert job.run("--retry", "poison").code == 3
    assert job.run("--retry", "failed", "--set", "engine.stub.fail_rate=0").code == 0
    assert {row["id"]: row["row_key"] for row in job.rows()} == before
    assert job.manifest("retry")[0]["rows"] == len(failed)
    assert len(job.committed_keys()) == 60 + len(failed)
    report = whole(job)
    assert (report["rows"], report["done"], report["failed"], report["pending"]) == (60, 60, 0, 0)
    assert report["output_tokens"] == sum(row["output_tokens"] for row in job.rows())
    assert job.failures() == []
    assert job.run().code == 0
    assert len(job.committed_keys()) == 60 + len(failed)


@pytest.mark.parametrize(("wrong", "meant"), [("fialed", "failed"), ("truncatd", "truncated"), ("poisson", "poison")])
def test_retry_of_what_does_not_exist(make_job: MakeJob, wrong: str, meant: str) -> None:
    job = make_job(prompts(3))
    ended = job.run("--retry", wrong)
    assert (ended.code, ended.out) == (2, "")
    assert f"--retry {wrong}: no such code; did you mean {meant}?" in ended.err
    assert not job.run_folder.exists()


def test_retry_of_truncated_rows_with_more_tokens(make_job: MakeJob) -> None:
    job = make_job(prompts(60))
    job.run()
    cut = {row["id"] for row in job.rows() if row["finish_reason"] == "length"}
    assert cut
    more = ("--set", "sampling.max_tokens=500", "--changed", "keep")
    assert job.run(*more, "--retry", "truncated").code == 0
    by_settings: dict[str, set[str]] = {}
    for row in job.rows():
        by_settings.setdefault(row["settings_key"], set()).add(row["id"])
    assert cut in by_settings.values()
    assert len(by_settings) == 2


def test_a_retry_that_was_killed_goes_on(make_job: MakeJob) -> None:
    job = make_job(prompts(60), engine={"stub": {"fail_rate": 0.5}})
    assert job.run().code == 3
    dies = ("--set", "engine.stub.poison=[row]", "--set", "engine.stub.fail_rate=0", "--set", "engine.max_restarts=0")
    assert job.run("--retry", "failed", *dies).code == 4
    assert job.run("--set", "engine.stub.fail_rate=0").code == 0
    assert {row["status"] for row in job.rows()} == {"done"}


def test_a_job_whose_first_rows_all_fail_is_stopped_before_the_engine(make_job: MakeJob) -> None:
    job = make_job([{"id": i, "prompt": ""} for i in range(3000)], engine={"stub": {"die_on_start": 9}})
    ended = job.run()
    assert ended.code == 6
    assert "in.jsonl:1: empty_prompt" in ended.err
    assert "--max-failures 100%" in ended.err
    assert job.run("--max-failures", "100%").code == 3


def test_a_job_whose_rows_all_fail_in_the_engine_is_stopped(make_job: MakeJob) -> None:
    job = make_job(prompts(2000), engine={"max_num_seqs": 50, "stub": {"fail_rate": 1}}, output={"commit_rows": 50})
    ended = job.run()
    assert ended.code == 6
    assert "rows all failed" in ended.err
    assert len(job.committed_keys()) < 2000


def test_max_failures_as_a_number(make_job: MakeJob) -> None:
    rows = prompts(300)
    for i in range(0, 300, 30):
        rows[i]["prompt"] = ""
    job = make_job(rows)
    assert job.run("--max-failures", "9").code == 6
    assert job.run("--max-failures", "10").code == 3


@pytest.mark.parametrize("limit", [[], ["--max-failures", "40%"], ["--max-failures", "200"]])
def test_refused_rows_at_the_front_do_not_stop_a_job_that_works(make_job: MakeJob, limit: list[str]) -> None:
    rows = prompts(600)
    for row in rows[:150]:
        row["prompt"] = ""
    job = make_job(rows, output={"commit_rows": 20})
    assert job.run(*limit).code == 3
    assert sum(row["status"] == "done" for row in job.rows()) == 450


def test_few_rows_that_all_fail_are_just_failed(make_job: MakeJob) -> None:
    job = make_job([{"id": i, "prompt": ""} for i in range(20)])
    assert job.run().code == 3


@pytest.mark.parametrize(
    ("text", "failed", "tried", "stops"),
    [
        (None, 99, 99, False),
        (None, 100, 100, True),
        (None, 100, 101, False),
        ("5", 5, 5, False),
        ("5", 6, 1000, True),
        ("5%", 99, 99, False),
        ("5%", 6, 100, True),
        ("5%", 5, 100, False),
        ("0%", 1, 200, True),
        ("100%", 500, 500, False),
    ],
)
def test_failure_limit(text: str | None, failed: int, tried: int, stops: bool) -> None:
    assert (FailureLimit.parse(text).exceeded(failed, tried) is not None) == stops


def test_refused_rows_count_as_a_number_only() -> None:
    assert FailureLimit.parse("5").exceeded(3, 1000, refused=3) is not None
    assert FailureLimit.parse("5%").exceeded(3, 1000, refused=300) is None
    assert FailureLimit.parse(None).exceeded(0, 0, refused=300) is None


@pytest.mark.parametrize("text", ["", "x", "-1", "5 %%", "101%", "1.5"])
def test_a_wrong_failure_limit(text: str) -> None:
    with pytest.raises(SpecError, match="such as 50 or 5%"):
        FailureLimit.parse(text)


def test_seeds_follow_from_the_jobs_seed_and_the_row_alone() -> None:
    keys = [bytes([i]) * 16 for i in range(50)]
    seeds = [row_seed(7, key) for key in keys]
    assert seeds == [row_seed(7, key) for key in keys]
    assert len(set(seeds)) == 50
    assert not set(seeds) & {row_seed(8, key) for key in keys}
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert row_seed(-1, keys[0]) != row_seed(1, keys[0])


def test_a_row_has_its_key_wherever_it_stands(make_job: MakeJob, tmp_path: Path) -> None:
    rows = prompts(20)
    job, other = make_job(rows), make_job(rows[::-1], shards={"target_rows": 3})
    job.run()
    other.run()
    keys = [{row["id"]: row["row_key"] for row in j.rows()} for j in (job, other)]
    assert keys[0] == keys[1]


def test_other_files_in_an_output_folder_stay(make_job: MakeJob) -> None:
    job = make_job(prompts(5), output={"path": "out/"})
    job.run()
    ours = job.output / "part-00000.parquet"
    others = [job.output / name for name in ("part-00000-saved.parquet", "part-9.parquet", "part-00007.parquet")]
    for other in others:
        other.write_bytes(ours.read_bytes())
    (job.output / "part-00007.parquet.bulkgen").mkdir()  # the output of another job
    assert job.run(*NINE, "--changed", "again").code == 0
    assert all(other.exists() for other in others)
    begun = len(job.manifest("start"))
    assert job.run(*NINE).code == 0
    assert len(job.manifest("start")) == begun  # nothing to do


def test_an_output_that_was_written_over_is_made_again(make_job: MakeJob) -> None:
    job = make_job(prompts(5))
    job.run()
    whole_output = job.output.read_bytes()
    job.output.write_bytes(bytes(len(whole_output)))
    assert job.run().code == 0
    assert job.output.read_bytes() == whole_output
