"""Public fault cases about what is asked of an engine and what it answers: several samples, log probabilities, empty
answers, forms; whole runs on the stub engine, each with rows near to it."""

import json
import math
import signal
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cases.outcomes import Rows, outcomes, run
from tests.harness import Job, bulkgen
from tests.test_job import wait_for_parts

MakeJob = Callable[..., Job]

N: dict[str, Any] = {"column": "n", "default": 2}


def texts(row: dict[str, Any]) -> list[str]:
    """The texts of a row's samples, whose indexes must be 0, 1, 2 and so on."""
    assert [sample["index"] for sample in row["samples"]] == list(range(len(row["samples"])))
    return [sample["text"] for sample in row["samples"]]


def echoes(prompt: str, number: int) -> list[str]:
    return [f"echo{f' {i}' if i else ''}:{prompt}" for i in range(number)]


def report(job: Job) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    text = bulkgen("report", str(job.output), "--json").out
    whole: dict[str, Any] = json.loads(text, parse_constant=refuse)["whole"]
    return whole


def shown(job: Job) -> str:
    """The report as a person sees it, with single spaces."""
    return " ".join(bulkgen("report", str(job.output)).out.split())


def pending(job: Job) -> list[int]:
    """The rows that were to be generated, start by start."""
    return [plan["pending"] for plan in job.manifest("plan")]


# ---- several samples ----

ASKED = [
    {"id": "a", "prompt": "ask a", "n": 3},
    {"id": "b", "prompt": "ask b", "n": 1},
    {"id": "c", "prompt": "ask c"},
    {"id": "null", "prompt": "ask null", "n": None},
    {"id": "zero", "prompt": "ask zero", "n": 0},
    {"id": "negative", "prompt": "ask negative", "n": -1},
    {"id": "text", "prompt": "ask text", "n": "2"},
    {"id": "half", "prompt": "ask half", "n": 1.5},
    {"id": "huge", "prompt": "ask huge", "n": 1_000_000},
    {"id": "f", "prompt": "ask f", "n": 2},
]
SAMPLES = {"a": 3, "b": 1, "c": 2, "null": 2, "f": 2}
WRONG_N = ("zero", "negative", "text", "half", "huge")


def test_43_n_greater_than_one(make_job: MakeJob) -> None:
    job = make_job(ASKED, sampling={"n": N, "temperature": 1})
    out = run(job, 3)
    assert outcomes(out) == {**dict.fromkeys(SAMPLES, "done"), **dict.fromkeys(WRONG_N, "bad_sampling")}
    for row in out:
        if row["status"] == "done":
            assert texts(row) == echoes(row["prompt"], SAMPLES[row["id"]])
            assert row["text"] == row["samples"][0]["text"]
            assert row["finish_reason"] == row["samples"][0]["finish_reason"]
            assert row["output_tokens"] == sum(sample["output_tokens"] for sample in row["samples"])
        else:
            assert row["samples"] is None
    assert "must be 1 or more" in job.failures()[0]["error"]
    whole = report(job)
    assert (whole["rows"], whole["done"], whole["refused"], whole["answers"]) == (10, 5, 5, sum(SAMPLES.values()))
    assert f"answers {sum(SAMPLES.values())} of rows done" in shown(job)
    assert run(job, 3) == out
    assert len(job.manifest("ready")) == 1


def test_43_n_in_parquet_where_a_column_with_nulls_is_of_floats(make_job: MakeJob) -> None:
    job = make_job(input={"path": "in.parquet"}, sampling={"n": N})
    table = pa.table({"id": ["a", "b", "c"], "prompt": ["p", "q", "r"], "n": pa.array([3.0, None, 0.0])})
    pq.write_table(table, job.folder / "in.parquet")
    out = run(job, 3)
    assert outcomes(out) == {"a": "done", "b": "done", "c": "bad_sampling"}
    assert (texts(out[0]), texts(out[1])) == (echoes("p", 3), echoes("q", 2))


def test_43_the_same_number_for_all_rows(make_job: MakeJob) -> None:
    rows = [{"id": f"r{i}", "prompt": f"ask {i}"} for i in range(50)]
    job = make_job(rows, sampling={"n": 4}, engine={"replicas": 2, "max_num_seqs": 6, "stub": {"shuffle": True}})
    assert [texts(row) for row in run(job, 0)] == [echoes(row["prompt"], 4) for row in rows]
    assert report(job)["answers"] == 200
    greedy = make_job(rows, sampling={"n": 4, "temperature": 0}).run()
    assert greedy.code == 2
    assert "4 answers at temperature 0 would be 4 times the same" in greedy.err


def test_43_a_default_of_a_column_that_cannot_be_is_refused_with_the_spec(make_job: MakeJob) -> None:
    ended = make_job(ASKED, sampling={"n": {"column": "n", "default": 0}}).run()
    assert ended.code == 2
    assert "sampling.n.default: must be 1 or more, not 0" in ended.err


@pytest.mark.parametrize("attempts", [1, 3])
def test_43_an_engine_that_gives_too_few_samples(make_job: MakeJob, attempts: int) -> None:
    engine = {"max_attempts": attempts, "stub": {"short": ["ask a", "ask f"]}}
    job = make_job(ASKED[:4] + ASKED[-1:], sampling={"n": N}, engine=engine)
    out = run(job, 3)
    assert outcomes(out) == {
        "a": "missing_samples", "b": "done", "c": "done", "null": "done", "f": "missing_samples",
    }  # fmt: skip
    assert {row["id"]: row["attempts"] for row in out} == {"a": attempts, "b": 1, "c": 1, "null": 1, "f": attempts}
    assert [row["error"] for row in job.failures()] == [
        "the engine returned 2 of 3 samples",
        "the engine returned 1 of 2 samples",
    ]
    assert [row["samples"] for row in out if row["status"] == "failed"] == [None, None]
    whole = report(job)
    assert (whole["done"], whole["failed"], whole["answers"]) == (3, 2, 5)
    assert whole["error_codes"] == {"missing_samples": 2}
    again = run(job, 0, "--retry", "missing_samples", "--set", "engine.stub.short=[]")
    assert [len(texts(row)) for row in again] == [3, 1, 2, 2, 2]
    assert pending(job) == [5, 2]


def test_43_an_engine_that_dies_between_the_samples_of_a_row(make_job: MakeJob) -> None:
    # Three sequences at a time: row a takes all of them, and b begins as soon as one of a's has ended. It is a single
    # token long, so the engine dies of it while the others of a still run.
    rows = [{"id": "a", "prompt": "ask a", "n": 3, "most": 60}, {"id": "b", "prompt": "ask b", "n": 1, "most": 1}]
    sampling = {"n": {"column": "n"}, "max_tokens": {"column": "most"}}
    job = make_job(rows, sampling=sampling, engine={"max_num_seqs": 3, "stub": {"die_at": [1], "step_s": 0.001}})
    out = run(job, 0)
    assert {row["attempts"] for row in out} == {2}  # both were in the engine when it died
    assert len(job.manifest("restart")) == 1
    assert [texts(row) for row in out] == [echoes("ask a", 3), echoes("ask b", 1)]
    tokens = [sample["output_tokens"] for sample in out[0]["samples"]]
    assert len(set(tokens)) == 3  # so that they do not end together
    assert (len(job.committed_keys()), report(job)["answers"]) == (2, 4)


def test_43_a_run_that_is_killed_between_the_samples_of_a_row(make_job: MakeJob) -> None:
    rows: Rows = [{"id": f"r{i:02d}", "prompt": f"ask {i:02d}", "n": 1 + i % 4} for i in range(24)]
    stuck = {"max_num_seqs": 5, "stub": {"stuck": ["ask 23"]}}
    output = {"commit_rows": 3, "commit_s": 0.1}
    job = make_job(rows, sampling={"n": {"column": "n"}}, engine=stuck, output=output)
    process = job.start()
    wait_for_parts(job, 2, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    first = set(job.committed_keys())
    assert 0 < len(first) < 24
    out = run(job, 0, "--set", "engine.stub.stuck=[]")
    assert [texts(row) for row in out] == [echoes(row["prompt"], row["n"]) for row in rows]
    assert pending(job) == [24, 24 - len(first)]
    assert report(job)["answers"] == sum(row["n"] for row in rows)


@pytest.mark.parametrize("fault", ["double_rate", "lose_rate", "swap_rate", "flaky_rate"])
def test_43_samples_stay_with_their_row_whatever_the_engine_does(make_job: MakeJob, fault: str) -> None:
    rows: Rows = [
        {"id": f"r{i:02d}", "prompt": f"ask {i:02d} {'word ' * (i * 7 % 20)}", "n": 1 + i % 4} for i in range(40)
    ]
    stub = {fault: 0.1, "seed": 3, "shuffle": True, "step_s": 0.0001}
    job = make_job(rows, sampling={"n": {"column": "n"}}, engine={"max_num_seqs": 7, "stub": stub})
    out = run(job, 0)
    assert [texts(row) for row in out] == [echoes(row["prompt"], row["n"]) for row in rows]


def test_43_a_row_of_several_samples_that_kills_the_engine_is_singled_out(make_job: MakeJob) -> None:
    rows: Rows = [{"id": f"r{i:02d}", "prompt": f"ask {i:02d}", "n": 1 + i % 4} for i in range(20)]
    job = make_job(rows, sampling={"n": {"column": "n"}}, engine={"max_num_seqs": 8, "stub": {"poison": ["ask 11"]}})
    out = run(job, 3)
    assert outcomes(out) == {row["id"]: "poison" if row["id"] == "r11" else "done" for row in rows}
    assert all(texts(row) == echoes(row["prompt"], row["n"]) for row in out if row["id"] != "r11")


def test_43_a_row_whose_samples_never_end_is_taken_out_whole(make_job: MakeJob) -> None:
    rows = [{"id": f"r{i:02d}", "prompt": f"ask {i:02d}"} for i in range(12)]
    engine = {"max_num_seqs": 8, "row_timeout_s": 1.5, "stub": {"stuck": ["ask 05"], "step_s": 0.001}}
    job = make_job(rows, sampling={"n": 3}, engine=engine)
    out = run(job, 3)
    assert outcomes(out) == {row["id"]: "row_timeout" if row["id"] == "r05" else "done" for row in rows}
    assert all(texts(row) == echoes(row["prompt"], 3) for row in out if row["id"] != "r05")


def test_43_more_samples_than_the_engine_holds(make_job: MakeJob) -> None:
    """Each sample takes room in the KV cache of its own, and the row must not need it for all of them at once."""
    rows = [{"id": "many", "prompt": "ask many", "n": 200}, {"id": "big", "prompt": "word " * 300, "n": 2}]
    sampling = {"n": {"column": "n"}, "max_tokens": 40}
    job = make_job(rows, sampling=sampling, engine={"max_num_seqs": 8, "stub": {"kv_tokens": 256}})
    out = run(job, 3)
    assert outcomes(out) == {"many": "done", "big": "larger_than_kv_cache"}
    assert texts(out[0]) == echoes("ask many", 200)


def test_43_the_engine_is_fed_by_samples(make_job: MakeJob) -> None:
    rows = [{"id": f"r{i:03d}", "prompt": f"ask {i}"} for i in range(60)]
    job = make_job(rows, sampling={"n": 10}, engine={"max_num_seqs": 10, "stub": {"die_at": [3], "step_s": 0.001}})
    out = run(job, 0)
    assert [texts(row) for row in out] == [echoes(row["prompt"], 10) for row in rows]
    # It is given two batches of sequences at a time, not of rows.
    assert 1 <= job.manifest("restart")[0]["in_engine"] <= 2


def test_43_each_sample_has_a_seed_of_its_own_and_the_request_says_the_job_s(make_job: MakeJob) -> None:
    rows = [{"id": "a", "prompt": "ask"}, {"id": "b", "prompt": "ask"}]
    job = make_job(rows, sampling={"n": 2, "seed": 5}, engine={"stub": {"echo_params": True}})
    out = run(job, 0)
    seeds = [json.loads(row["text"])["seed"] for row in out]
    assert seeds[0] != seeds[1]
    assert [json.loads(row["text"])["n"] for row in out] == [2, 2]


# ---- log probabilities ----


def test_44_minus_inf_logprobs(make_job: MakeJob) -> None:
    rows = [{"id": i, "prompt": f"{i} {'-inf here' if i == 'b' else 'normal'}"} for i in "abc"]
    job = make_job(rows, sampling={"logprobs": 5}, engine={"stub": {"neg_inf": ["-inf"], "output_tokens": 3}})
    out = run(job, 0)
    for row in out:
        assert len(row["logprobs"]) == row["output_tokens"] == 3
        for place in row["logprobs"]:
            assert math.isfinite(place["logprob"])
            values = [likely["logprob"] for likely in place["top"]]
            assert len(values) == 5
            assert [math.isfinite(value) for value in values] == [True] * 4 + [row["id"] != "b"]
    assert out[1]["logprobs"][0]["top"][4]["logprob"] == -math.inf
    assert report(job)["done"] == 3
    job.output.unlink()  # what is committed has them too
    assert repr(run(job, 0)) == repr(out)
    assert len(job.manifest("ready")) == 1


def test_44_with_samples_and_columns(make_job: MakeJob) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "none", "prompt": "p"},
        {"id": "own", "prompt": "q -inf", "top": 0},
        {"id": "two", "prompt": "r -inf", "top": 2},
        {"id": "wrong", "prompt": "s", "top": 21},
        {"id": "negative", "prompt": "t", "top": -1},
    ]
    sampling = {"logprobs": {"column": "top"}, "n": 2}
    job = make_job(rows, sampling=sampling, engine={"stub": {"neg_inf": ["-inf"], "output_tokens": 2}})
    out = run(job, 3)
    assert outcomes(out) == {
        "none": "done", "own": "done", "two": "done", "wrong": "bad_sampling", "negative": "bad_sampling",
    }  # fmt: skip
    none, own, two = out[:3]
    assert none["logprobs"] is None
    assert [sample["logprobs"] for sample in none["samples"]] == [None, None]
    assert [len(place["top"]) for place in own["logprobs"]] == [0, 0]
    for sample in two["samples"]:
        assert [len(place["top"]) for place in sample["logprobs"]] == [2, 2]
        assert sample["logprobs"][0]["top"][1]["logprob"] == -math.inf
    assert two["logprobs"] == two["samples"][0]["logprobs"]


def test_44_what_is_shown_of_rows_with_infinities_is_strict_json(make_job: MakeJob) -> None:
    rows = [{"id": "a", "prompt": "x -inf"}, {"id": "b", "prompt": "y", "n": 0}]
    job = make_job(rows, sampling={"logprobs": 1, "n": N}, engine={"stub": {"neg_inf": ["-inf"]}})
    run(job, 3)
    for command in ("report", "status", "failures"):
        text = bulkgen(command, str(job.output), "--json").out
        assert not {"Infinity", "NaN"} & set(text.replace("-", " ").replace(",", " ").split())
        json.loads(text)


# ---- empty answers ----


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1}, {"temperature": 1, "seed": 5}])
def test_45_empty_output_at_length(make_job: MakeJob, sampling: dict[str, Any]) -> None:
    rows = [{"id": i, "prompt": f"{i} please"} for i in ("a", "think", "silent", "d")]
    stub = {"answers": {"think": "", "silent": ""}, "cut": ["think"]}
    price = {"usd_per_hour": 3.6}
    job = make_job(rows, sampling={**sampling, "max_tokens": 64}, engine={"max_attempts": 3, "stub": stub}, price=price)
    out = run(job, 0)
    assert outcomes(out) == dict.fromkeys(("a", "think", "silent", "d"), "done")
    told = {row["id"]: (row["text"], row["finish_reason"], row["output_tokens"], row["warnings"]) for row in out}
    assert told["think"] == ("", "length", 64, ["empty_output"])
    assert told["silent"] == ("", "stop", 1, ["empty_output"])
    assert [row["attempts"] for row in out] == [1, 1, 1, 1]
    whole = report(job)
    assert (whole["done"], whole["empty"], whole["empty_at_length"], whole["retried"]) == (4, 2, 1, 0)
    assert whole["warnings"] == {"empty_output": 2}
    assert whole["output_tokens"] == sum(row["output_tokens"] for row in out)
    assert whole["engine_output_tokens"] == whole["output_tokens"]  # nothing was sent twice
    assert whole["usd"] > 0
    assert "rows empty 2 done without text, 1 of them cut" in shown(job)
    assert run(job, 0) == out
    assert len(job.manifest("ready")) == 1
    again = run(job, 0, "--retry", "empty_output", "--set", "engine.stub.answers={}")
    assert [row["text"] for row in again] == [f"echo:{row['prompt']}" for row in rows]
    assert pending(job)[-1] == 2


def test_45_one_empty_sample_of_several_shows(make_job: MakeJob) -> None:
    rows = [{"id": "a", "prompt": "all silent"}, {"id": "b", "prompt": "other"}]
    job = make_job(rows, sampling={"n": 2}, engine={"stub": {"answers": {"silent": ""}}})
    out = run(job, 0)
    assert [row["warnings"] for row in out] == [["empty_output"], None]
    assert texts(out[0]) == ["", ""]
    assert report(job)["empty"] == 1


# ---- forms ----

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}


def asks(row_id: str, **body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"json {row_id}"}], "max_tokens": 32, **body}
    return {"custom_id": row_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


BATCH: dict[str, Any] = {"id": None, "prompt": None, "batch": True}
SPACES = '{"a":' + " " * 2000
ANSWERS = {"json cut": '{"a": 1', "json spaces": SPACES, "json other": '{"b": 1}', "json done": '{"a": 1}' + "\n" * 50}


def test_50_unfinished_structured_output(make_job: MakeJob) -> None:
    ids = ("fine", "cut", "spaces", "other", "done", "fine2")
    rows = [asks(row_id, response_format=FORM) for row_id in ids]
    stub = {"answers": ANSWERS, "cut": ["json cut", "json spaces", "json done"], "output_tokens": 7}
    job = make_job(rows, input=BATCH, engine={"stub": stub})
    out = run(job, 0)
    told = {row["custom_id"]: (row["valid"], row["finish_reason"], row["warnings"]) for row in out}
    assert told == {
        "fine": (True, "stop", None),
        "cut": (False, "length", ["unfinished_output"]),
        "spaces": (False, "length", ["unfinished_output"]),
        "other": (False, "stop", ["invalid_output"]),
        "done": (True, "length", None),
        "fine2": (True, "stop", None),
    }
    kept = {row["custom_id"]: row["text"] for row in out}
    assert (kept["cut"], kept["spaces"]) == ('{"a": 1', SPACES)
    assert json.loads(kept["fine"]) == {"a": 0}
    whole = report(job)
    assert whole["warnings"] == {"unfinished_output": 2, "invalid_output": 1}
    assert (whole["done"], whole["invalid"], whole["invalid_at_length"]) == (6, 3, 2)
    assert whole["invalid_output_tokens"] == 32 + 32 + 7
    assert "rows invalid 3 done, not in the form asked for, 2 of them cut; 71 output tokens" in shown(job)
    assert {row["attempts"] for row in out} == {1}
    assert run(job, 0) == out
    again = run(
        job, 0, "--retry", "unfinished_output", "--set", "engine.stub.answers={}", "--set", "engine.stub.cut=[]"
    )
    assert [row["valid"] for row in again] == [True, True, True, False, True, True]
    assert pending(job)[-1] == 2
    assert report(job)["invalid"] == 1


def test_50_each_of_several_samples_is_judged(make_job: MakeJob) -> None:
    rows = [asks("fine", response_format=FORM, n=2), asks("cut", response_format=FORM, n=2), asks("free", n=2)]
    job = make_job(rows, input=BATCH, engine={"stub": {"answers": ANSWERS, "cut": ["json cut"]}})
    out = run(job, 0)
    assert [[sample["valid"] for sample in row["samples"]] for row in out] == [
        [True, True], [False, False], [None, None],
    ]  # fmt: skip
    assert [row["valid"] for row in out] == [True, False, None]
    assert (report(job)["invalid"], report(job)["answers"]) == (1, 6)


FORMS: dict[str, Any] = {
    "schema": {"json_schema": {"type": "object", "properties": {"z": {"enum": ["x", 1]}, "a": {"type": "null"}}}},
    "text": json.dumps({"json_schema": json.dumps(SCHEMA)}),
    "choice": {"choice": ["yes", "no"]},
    "object": {"json_object": True},
    "regex": {"regex": "echo:.*"},
    "other regex": {"regex": "[0-9]+"},
    "grammar": {"grammar": "root ::= 'x'"},
    "none": None,
}
BAD_FORMS: dict[str, Any] = {
    "open bracket": {"regex": "("},
    "no kind": {"yaml": "x"},
    "two kinds": {"regex": "a", "choice": ["b"]},
    "type": {"json_schema": {"type": "objekt"}},
    "number as $schema": {"json_schema": {"$schema": 5}},
    "no JSON": '{"json_schema": ',
    "list": ["a"],
    "half a character": json.dumps({"json_schema": {"const": "\ud800"}}),
    "deep": {"json_schema": json.loads('{"not":' * 300 + "{}" + "}" * 300)},
    "engine": {"grammar": "no rule in it"},
}


def test_50_forms_from_a_column_good_and_bad_side_by_side(make_job: MakeJob) -> None:
    forms = [*FORMS.items(), *BAD_FORMS.items()]
    rows = [{"id": name, "prompt": f"ask {name}", "form": form} for name, form in forms]
    rows.sort(key=lambda row: len(row["id"]))  # good and bad ones mixed
    job = make_job(rows, sampling={"structured_outputs": {"column": "form"}})
    out = run(job, 3)
    assert outcomes(out) == {**dict.fromkeys(FORMS, "done"), **dict.fromkeys(BAD_FORMS, "bad_schema")}
    assert {row["id"]: row["valid"] for row in out if row["status"] == "done"} == {
        "schema": True, "text": True, "choice": True, "object": True, "regex": True,
        "other regex": False, "grammar": None, "none": None,
    }  # fmt: skip
    whole = report(job)
    assert whole["error_codes"] == {"bad_schema": 1}  # found by the engine alone
    assert whole["refused_codes"] == {"bad_schema": len(BAD_FORMS) - 1}
    assert not job.manifest("restart")


def test_50_a_form_for_all_rows(make_job: MakeJob) -> None:
    rows = [{"id": f"r{i}", "prompt": f"ask {i}"} for i in range(3)]
    job = make_job(rows, sampling={"structured_outputs": {"json_schema": SCHEMA}})
    assert [(json.loads(row["text"]), row["valid"]) for row in run(job, 0)] == [({"a": 0}, True)] * 3
    for form, words in (
        ({"json_schema": {"type": "objekt"}}, "'objekt' is not valid"),
        ({"regex": "("}, "the regular expression cannot be compiled"),
        ({}, "needs exactly one of json_schema, regex, choice, grammar, json_object, column; there is none"),
    ):
        ended = make_job(rows, sampling={"structured_outputs": form}).run()
        assert ended.code == 2
        assert words in ended.err


BAD_FORMATS: dict[str, Any] = {
    "text": "json_object",
    "no type": {},
    "other type": {"type": "grammar"},
    "no schema": {"type": "json_schema"},
    "null schema": {"type": "json_schema", "json_schema": {"name": "s", "schema": None}},
    "bad schema": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": 5}}},
    "list as schema": {"type": "json_schema", "json_schema": {"name": "s", "schema": [1]}},
}


def test_50_forms_of_batch_lines(make_job: MakeJob) -> None:
    rows = [
        asks("object", response_format={"type": "json_object"}),
        asks("plain", response_format={"type": "text"}),
        asks("vllm", structured_outputs={"json": SCHEMA}),
        asks("choice", structured_outputs={"choice": ["yes"]}),
        asks("both", structured_outputs={"json": SCHEMA}, response_format=FORM),
        *(asks(name, response_format=wanted) for name, wanted in BAD_FORMATS.items()),
    ]
    job = make_job(rows, input=BATCH, sampling={"structured_outputs": {"choice": ["default"]}})
    out = run(job, 3)
    bad = dict.fromkeys(("both", *BAD_FORMATS), "bad_schema")
    assert outcomes(out, "custom_id") == {**dict.fromkeys(("object", "plain", "vllm", "choice"), "done"), **bad}
    told = {row["custom_id"]: row["text"] for row in out if row["status"] == "done"}
    assert told == {"object": '{"answer": 0}', "plain": "echo:json plain", "vllm": '{"a": 0}', "choice": "yes"}
    assert [row["valid"] for row in out[:4]] == [True, None, True, True]


# ---- other parameters ----


def test_ignore_eos_from_a_column(make_job: MakeJob) -> None:
    rows = [
        {"id": "yes", "prompt": "p", "go_on": True},
        {"id": "null", "prompt": "q", "go_on": None},
        {"id": "number", "prompt": "r", "go_on": 1},
    ]
    job = make_job(
        rows,
        sampling={"ignore_eos": {"column": "go_on", "default": False}},
        engine={"stub": {"echo_params": True}},
    )
    out = run(job, 3)
    assert outcomes(out) == {"yes": "done", "null": "done", "number": "bad_sampling"}
    assert [json.loads(row["text"])["ignore_eos"] for row in out[:2]] == [True, False]


def test_columns_that_a_job_cannot_fill_are_not_there(make_job: MakeJob) -> None:
    rows = [{"id": "a", "prompt": "p", "valid": "mine", "samples": 3}]
    job = make_job(rows)
    run(job, 0)
    assert pq.read_schema(job.output).names[:5] == ["id", "prompt", "valid", "samples", "status"]
    taken = make_job(rows, sampling={"n": 2}).run()
    assert taken.code == 2
    assert "column 'samples' of the input has the name of one that bulkgen writes" in taken.err
    own = make_job(rows, sampling={"logprobs": 1}, output={"column": "logprobs"}).run()
    assert own.code == 2
    assert "output.column" in own.err
