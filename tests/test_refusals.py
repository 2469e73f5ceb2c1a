"""What cannot work ends in seconds, with one sentence that names the place and the cure, and the right exit code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.harness import Ended, Job, bulkgen, model_folder, prompts

MakeJob = Callable[..., Job]


def assert_refused(ended: Ended, code: int, *words: str) -> None:
    """One sentence with these words, no traceback, nothing on standard output."""
    lines = [line for line in ended.err.splitlines() if line.startswith("bulkgen: ")]
    assert ended.code == code, ended
    assert len(lines) == 1, ended.err
    assert "Traceback" not in ended.err
    assert ended.out == ""
    for word in words:
        assert word in lines[0], lines[0]


SPEC_FAULTS: list[tuple[dict[str, Any], list[str]]] = [
    ({"sampling": {"temprature": 0}}, ["job.yaml:", "unknown key 'temprature' in sampling", "'temperature'"]),
    ({"sampling": {"max_tokens": 0}}, ["job.yaml:12", "sampling.max_tokens must be 1 or more, not 0"]),
    ({"price": {"usd_per_hour": -1}}, ["job.yaml:12", "price.usd_per_hour must be 0 or more, not -1"]),
    ({"engine": {"replicas": 0}}, ["job.yaml:3", "engine.replicas must be 1 or more, not 0"]),
    ({"engine": {"config": "none.yaml"}}, ["job.yaml:2", "engine.config", "none.yaml does not exist"]),
    ({"output": {"path": "out.csv"}}, ["job.yaml:", "output.path", ".csv", ".parquet"]),
    ({"output": {"column": "error"}}, ["job.yaml:", "output.column", "choose another name"]),
    ({"output": {"column": "extra"}}, ["output.column 'extra' is a column of the input already"]),
    ({"input": {"prompt": "promt"}}, ["column 'promt' is in no row", "in.jsonl", "did you mean 'prompt'?"]),
    ({"input": {"id": "key"}}, ["column 'key' is in no row", "in.jsonl"]),
    ({"sampling": {"seed": {"column": "seeed"}}}, ["column 'seeed' is in no row"]),
    ({"input": {"prompt": None, "template": "{{ prmpt }}"}}, ["column 'prmpt' is in no row", "did you mean 'prompt'?"]),
    ({"input": {"prompt": None, "template": "{{ prompt"}}, ["input.template", "line 1", "not valid Jinja2"]),
    ({"input": {"messages": "prompt"}}, ["job.yaml:", "input", "exactly one of messages, prompt, template and batch"]),
    ({"engine": {"env": {"A\0": "x"}}}, ["job.yaml:", "engine.env", "holds what no environment variable can"]),
    ({"engine": {"env": {"A": "x\0"}}}, ["job.yaml:", "engine.env.A", "holds what no environment variable can"]),
    ({"engine": {"env": {"A": "\ud800"}}}, ["job.yaml:", "engine.env.A", "holds what no environment variable can"]),
    ({"engine": {"config": "x" * 300}}, ["job.yaml:", "engine.config", "File name too long"]),
    ({"input": {"chat_template": "x" * 300}}, ["job.yaml:", "input.chat_template", "File name too long"]),
    ({"output": {"path": "o\0.parquet"}}, ["job.yaml:", "output.path", "NUL"]),
    ({"model": "~no-such-user/m"}, ["model ~no-such-user/m", "cannot be looked up"]),
    ({"model": "x" * 300}, ["model xxx", "File name too long"]),
    ({"model": "no/such-model", "engine": {"kind": "vllm"}}, ["model 'no/such-model'", "not a folder here"]),
]


@pytest.mark.parametrize(("sections", "words"), SPEC_FAULTS)
def test_a_wrong_spec_is_refused(make_job: MakeJob, sections: dict[str, Any], words: list[str]) -> None:
    job = make_job(prompts(20), **sections)
    assert_refused(job.run(), 2, *words)
    assert not job.output.exists()


def test_several_faults_are_told_at_once(make_job: MakeJob) -> None:
    ended = make_job(prompts(1), sampling={"max_tokens": 0, "tmp": 1}).run()
    assert ended.code == 2
    assert len([line for line in ended.err.splitlines() if line.startswith("bulkgen: ")]) == 2


def test_set_is_named_as_the_place(make_job: MakeJob) -> None:
    ended = make_job(prompts(1)).run("--set", "sampling.top_p=7")
    assert_refused(ended, 2, "--set sampling.top_p=7", "sampling.top_p must be 1 or less, not 7")


def test_a_missing_spec_file(tmp_path: Path) -> None:
    assert_refused(bulkgen("run", str(tmp_path / "none.yaml")), 2, "none.yaml", "No such file")


@pytest.mark.parametrize(
    ("path", "words"), [("none.jsonl", ["none.jsonl"]), ("none/*.parquet", ["none/*.parquet"]), ("empty/", ["empty"])]
)
def test_an_input_that_is_not_there(make_job: MakeJob, path: str, words: list[str]) -> None:
    job = make_job(input={"path": path})
    (job.folder / "empty").mkdir()
    assert_refused(job.run(), 6, *words)


def test_an_input_without_rows(make_job: MakeJob) -> None:
    job = make_job([])
    assert_refused(job.run(), 6, "in.jsonl", "no rows", "input.allow_empty")
    assert job.run("--set", "input.allow_empty=true").code == 0
    assert job.rows() == []


def test_an_empty_parquet_file_gives_an_output_with_its_columns(make_job: MakeJob) -> None:
    job = make_job(input={"path": "in.parquet", "allow_empty": True})
    schema = pa.schema([("id", pa.int64()), ("prompt", pa.string())])
    pq.write_table(schema.empty_table(), job.folder / "in.parquet")
    assert job.run().code == 0
    assert pq.read_schema(job.output).names[:4] == ["id", "prompt", "status", "text"]


def test_a_file_that_is_no_parquet(make_job: MakeJob) -> None:
    job = make_job(input={"path": "in.parquet"})
    (job.folder / "in.parquet").write_text("id,prompt\n")
    assert_refused(job.run(), 6, "in.parquet")


def test_an_output_that_cannot_be_written(make_job: MakeJob) -> None:
    job = make_job(prompts(3), output={"path": "file/out.parquet"})
    (job.folder / "file").write_text("")
    assert_refused(job.run(), 6, "file/out.parquet", "Not a directory")


def test_an_output_that_is_a_folder(make_job: MakeJob) -> None:
    job = make_job(prompts(3))
    job.output.mkdir()
    assert_refused(job.run(), 6, "out.parquet", "is a folder")


@pytest.mark.parametrize("output", ["out.parquet", "out/"])
def test_an_output_that_holds_other_peoples_files(make_job: MakeJob, output: str) -> None:
    job = make_job(prompts(3), output={"path": output})
    foreign = job.output if output == "out.parquet" else job.output / "part-00000.parquet"
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_bytes(b"precious")
    assert_refused(job.run(), 6, "did not write", "choose another output.path")
    assert foreign.read_bytes() == b"precious"


def test_an_output_that_is_the_input(make_job: MakeJob) -> None:
    job = make_job(input={"path": "in.parquet"}, output={"path": "in.parquet"})
    pq.write_table(pa.table({"id": [1], "prompt": ["x"]}), job.folder / "in.parquet")
    before = (job.folder / "in.parquet").read_bytes()
    assert_refused(job.run(), 6, "in.parquet")
    assert (job.folder / "in.parquet").read_bytes() == before


def test_a_model_without_a_chat_template(make_job: MakeJob) -> None:
    job = make_job(prompts(3))
    model = str(model_folder(job.folder / "model", None))
    assert_refused(
        job.run("--set", f"model={model}"), 2, "no chat template", "input.chat_template", "input.chat: false"
    )
    assert job.run("--set", f"model={model}", "--set", "input.chat=false").code == 0
    plain = [row["prompt_tokens"] for row in job.rows()]
    (job.folder / "chat.jinja").write_text("{% for m in messages %}row {{ m.content }}{% endfor %}")
    other = job.run("--set", f"model={model}", "--set", "input.chat_template=chat.jinja", "--changed", "again")
    assert other.code == 0, other.err
    assert [row["prompt_tokens"] for row in job.rows()] == [number + 1 for number in plain]


def test_a_folder_that_is_no_model(make_job: MakeJob) -> None:
    job = make_job(prompts(3))
    assert_refused(job.run("--set", f"model={job.folder}"), 2, "config.json")


def test_a_chat_template_that_refuses_a_row_fails_that_row(make_job: MakeJob) -> None:
    template = "{% if 'row 1 ' in messages[0].content %}{{ raise_exception('no ones') }}{% endif %}row"
    job = make_job(prompts(3))
    model = str(model_folder(job.folder / "model", template))
    assert job.run("--set", f"model={model}").code == 3
    assert [f["error_code"] for f in job.failures()] == ["chat_template_error"]
    assert "no ones" in job.failures()[0]["error"]


@pytest.mark.parametrize("command", ["status", "report"])
def test_a_place_without_a_run(tmp_path: Path, command: str) -> None:
    assert_refused(bulkgen(command, str(tmp_path)), 6, "no bulkgen run here")


def test_a_wrong_option() -> None:
    ended = bulkgen("run", "--no-such-option")
    assert ended.code == 2
    assert "Traceback" not in ended.err


def test_control_characters_in_data_do_not_reach_the_terminal(make_job: MakeJob) -> None:
    ended = make_job(['{"\\u001b[2Jid": 1, "prompt": "x"}']).run()
    assert ended.code == 2
    assert "\x1b" not in ended.err
