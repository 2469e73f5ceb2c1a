"""Public fault cases about OpenAI batch files as input; whole runs on the stub engine, each with lines near to it."""

import json
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cases.outcomes import outcomes, run
from tests.harness import Job, bulkgen
from tests.test_job import wait_for_parts

MakeJob = Callable[..., Job]

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BATCH: dict[str, Any] = {"id": None, "prompt": None, "batch": True}
ECHO: dict[str, Any] = {"stub": {"echo_params": True}}


def says(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def line(row_id: str | None, url: str | None = CHAT, method: str | None = "POST", **body: Any) -> dict[str, Any]:
    """A line; keys whose value is None are left out."""
    if url is not None and url.endswith("chat/completions"):
        body = {"messages": says(f"ask {row_id}"), **body}
    whole: dict[str, Any] = {"custom_id": row_id, "method": method, "url": url, "body": body}
    return {key: value for key, value in whole.items() if value is not None}


def completion(row_id: str, **body: Any) -> dict[str, Any]:
    return line(row_id, COMPLETIONS, "POST", **{"prompt": f"go on {row_id}", **body})


def batch_job(make_job: MakeJob, rows: Sequence[Any] | None, **sections: Any) -> Job:
    return make_job(rows, **{**sections, "input": {**BATCH, **sections.get("input", {})}})


def outcome(rows: Sequence[Mapping[str, Any]]) -> dict[Any, str]:
    return outcomes(rows, "custom_id")


def sent(rows: Sequence[Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
    """The parameters that each done row was sent with, where the engine echoes them."""
    return {row["custom_id"]: json.loads(row["text"]) for row in rows if row["status"] == "done"}


def messages_of(job: Job) -> dict[int, str]:
    """Why each failed line failed, by its number."""
    return {row["position"]: f"{row['error_code']}: {row['error']}" for row in job.failures()}


def report(job: Job) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(bulkgen("report", str(job.output), "--json").out)["whole"]
    return whole


def pending(job: Job) -> list[int]:
    """The rows that were to be generated, start by start."""
    return [plan["pending"] for plan in job.manifest("plan")]


# ---- lines and bodies ----


def test_04_valid_json_not_an_object_in_a_batch(make_job: MakeJob) -> None:
    odd_bodies = [json.dumps({"messages": says("x")}), None, [], 5, True, [{"messages": says("in a list")}]]
    odd = [{**line(f"o{i}"), "body": body} for i, body in enumerate(odd_bodies)]
    without = {key: value for key, value in line("none").items() if key != "body"}
    rows = [line("a", model="stub"), '[{"custom_id":"l"}]', "null", '"text"', *odd, without, line("b", model="stub")]
    job = batch_job(make_job, rows)
    out = run(job, 3)
    assert len(out) == len(rows)
    wanted: dict[str | None, str] = {
        "a": "done",
        None: "not_an_object",
        **{f"o{i}": "bad_body" for i in range(len(odd))},
        "none": "bad_body",
        "b": "done",
    }
    assert outcome(out) == wanted
    assert [row["position"] for row in job.failures()] == list(range(2, len(rows)))
    why = messages_of(job)
    assert why[5].startswith("bad_body: its body must be an object, and is ")
    assert why[6] == why[11] == "bad_body: its body must be an object, and is null or missing"
    assert [row["raw"] for row in job.failures()][:3] == [b'[{"custom_id":"l"}]', b"null", b'"text"']
    assert [json.loads(row["row"])["custom_id"] for row in job.failures()[3:]] == [*(f"o{i}" for i in range(6)), "none"]


def test_a_file_of_no_batch_is_refused_before_an_engine_is_loaded(make_job: MakeJob) -> None:
    job = batch_job(make_job, [{"id": "a", "prompt": "p"}])
    ended = job.run()
    assert ended.code == 2
    assert "column 'body' is in no row of in.jsonl" in ended.err
    assert not (job.run_folder / "manifest.jsonl").exists() or not job.manifest("ready")


def test_lines_without_an_id_are_told_apart_by_their_place(make_job: MakeJob) -> None:
    rows = [line(None), line("same"), line("same"), line(None), {**line(None), "custom_id": None}]
    rows[1]["body"]["messages"] = rows[2]["body"]["messages"] = says("the same")
    job = batch_job(make_job, rows)
    out = run(job, 0)
    assert [row["text"] for row in out] == [
        "echo:ask None", "echo:the same", "echo:the same", "echo:ask None", "echo:ask None",
    ]  # fmt: skip
    assert run(job, 0) == out
    job.write([*rows, line("new")])
    assert len(run(job, 0)) == 6
    assert pending(job)[-1] == 1


# ---- the limit of tokens ----


def test_41_max_tokens_default_and_spelling(make_job: MakeJob) -> None:
    rows = [
        line("new name", max_completion_tokens=50),
        line("old name", max_tokens=50),
        line("none"),
        line("null", max_tokens=None),
        line("one is null", max_tokens=None, max_completion_tokens=50),
        completion("text new name", max_completion_tokens=50),
        completion("text none"),
        line("agree", max_tokens=50, max_completion_tokens=50),
        line("contradict", max_tokens=50, max_completion_tokens=60),
        line("zero", max_tokens=0),
        line("new zero", max_completion_tokens=0),
        line("negative", max_tokens=-1),
        line("text", max_tokens="50"),
        line("half", max_tokens=50.5),
        line("float", max_tokens=50.0),
        line("true", max_tokens=True),
        line("huge", max_tokens=2**31),
        line("typo", max_token=50),
        line("other name", max_output_tokens=50),
        line("beyond the context", max_tokens=100_000),
    ]
    job = batch_job(make_job, rows, sampling={"max_tokens": 512}, engine={**ECHO, "max_model_len": 4096})
    out = run(job, 3)
    assert {row_id: given["max_tokens"] for row_id, given in sent(out).items()} == {
        "new name": 50,
        "old name": 50,
        "none": 512,
        "null": 512,
        "one is null": 50,
        "text new name": 50,
        "text none": 512,
        "agree": 50,
        "float": 50,
        "beyond the context": 4096 - out[-1]["prompt_tokens"],
    }
    wrong = {row["custom_id"]: row["error_code"] for row in out if row["status"] == "failed"}
    assert wrong == {
        **dict.fromkeys(("contradict", "zero", "new zero", "negative", "text", "half", "true", "huge"), "bad_sampling"),
        "typo": "unknown_parameter",
        "other name": "unknown_parameter",
    }
    why = messages_of(job)
    assert "max_tokens is 50 and body.max_completion_tokens is 60" in why[9]
    assert "body.max_completion_tokens must be 1 or more" in why[11]
    assert "did you mean 'max_tokens'" in why[18]
    (capped,) = [row for row in out if row["custom_id"] == "beyond the context"]
    assert capped["warnings"] == ["max_tokens_capped"]


@pytest.mark.parametrize("batch", [True, False])
def test_41_no_limit_means_the_documented_one_and_cut_rows_show(make_job: MakeJob, batch: bool) -> None:
    rows = [line(f"r{i}") if batch else {"id": f"r{i}", "prompt": f"ask r{i}"} for i in range(3)]
    job = make_job(rows, input=BATCH if batch else {}, sampling={"max_tokens": None}, engine={"stub": {"cut": ["r1"]}})
    text = job.path.read_text().replace("  max_tokens: null\n", "  temperature: 0.5\n")
    job.path.write_text(text)
    out = run(job, 0)
    assert [row["finish_reason"] for row in out] == ["stop", "length", "stop"]
    assert out[1]["output_tokens"] == 512
    assert (report(job)["finish_length"], report(job)["finish_stop"]) == (1, 2)
    assert "rows cut 1 done, but cut at max_tokens" in " ".join(bulkgen("report", str(job.output)).out.split())


# ---- other parameters ----


def test_parameters_of_a_line_win_over_those_of_the_job(make_job: MakeJob) -> None:
    own: dict[str, Any] = {
        "temperature": 0.25, "top_p": 0.5, "top_k": 7, "min_p": 0.125, "seed": 5, "stop": ["END", "."], "min_tokens": 2,
        "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5, "n": 1, "ignore_eos": True,
    }  # fmt: skip
    job_own: dict[str, Any] = {"temperature": 0.75, "max_tokens": 40, "seed": 1, "logprobs": 2, "stop": "X"}
    rows = [
        line("own", **own, max_tokens=9),
        line("none"),
        line("nulls", **dict.fromkeys(own)),
        completion("text", **own, logprobs=1),
        line("off", logprobs=False),
        line("on", logprobs=True, top_logprobs=4),
        line("bare", logprobs=True),
        line("plain text", response_format={"type": "text"}),
    ]
    job = batch_job(make_job, rows, sampling=job_own, engine=ECHO)
    given = sent(run(job, 0))
    assert given["own"] == {**own, "max_tokens": 9, "logprobs": 2}
    assert given["text"] == {**own, "max_tokens": 40, "logprobs": 1}
    seed = given["none"].pop("seed")
    assert given["none"] == {"temperature": 0.75, "max_tokens": 40, "logprobs": 2, "stop": "X"}
    assert seed != given["nulls"].pop("seed")
    assert given["nulls"] == given["none"]
    assert [given[row_id]["logprobs"] for row_id in ("off", "on", "bare")] == [None, 4, 0]
    assert "structured_outputs" not in given["plain text"]


NOTHING: dict[str, Any] = {
    "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "logit_bias": {}, "best_of": 1, "echo": False,
    "modalities": ["text"], "length_penalty": 1.0, "use_beam_search": False, "stream": False, "user": "somebody",
    "metadata": {"team": "x"}, "store": True, "service_tier": "flex", "stream_options": {"include_usage": True},
    "prompt_cache_key": "k", "skip_special_tokens": True, "chat_template_kwargs": {}, "stop": [], "top_logprobs": 0,
}  # fmt: skip
UNSUPPORTED: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required", "logit_bias": {"5": -100},
    "best_of": 2, "echo": True, "suffix": "end", "modalities": ["text", "audio"], "reasoning_effort": "low",
    "prompt_logprobs": 1, "chat_template_kwargs": {"thinking": True}, "skip_special_tokens": False, "audio": {},
}  # fmt: skip
WRONG: dict[str, Any] = {
    "temperature": -1, "top_p": 0, "n": 0, "seed": 2**63, "stop": [""], "presence_penalty": 3, "logprobs": 5,
    "top_logprobs": 3, "ignore_eos": 1, "min_tokens": 9,
}  # fmt: skip


def test_what_a_line_asks_for_is_done_or_refused_and_never_passed_over(make_job: MakeJob) -> None:
    rows = [
        line("nothing", **NOTHING),
        *(line(f"un {name}", **{name: value}) for name, value in UNSUPPORTED.items()),
        *(line(f"bad {name}", **{name: value}) for name, value in WRONG.items()),
        line("greedy twice", n=2, temperature=0),
        line("misspelt", temprature=0.5),
        line("of the other", COMPLETIONS, prompt="p", messages=says("x")),
        line("stream", stream="yes"),
        line("number of model", model=5),
    ]
    job = batch_job(make_job, rows, engine={"max_model_len": 1000})
    out = run(job, 3)
    assert outcome(out) == {
        "nothing": "done",
        **{f"un {name}": "unsupported_parameter" for name in UNSUPPORTED},
        **{f"bad {name}": "bad_sampling" for name in WRONG},
        "greedy twice": "bad_sampling",
        "misspelt": "unknown_parameter",
        "of the other": "unknown_parameter",
        "stream": "bad_body",
        "number of model": "bad_body",
    }
    assert "did you mean 'temperature'" in next(why for why in messages_of(job).values() if "temprature" in why)
    assert report(job)["refused_codes"]["unsupported_parameter"] == len(UNSUPPORTED)


# ---- endpoints ----


def test_47_mixed_endpoints(make_job: MakeJob) -> None:
    rows = [
        line("chat", max_tokens=8),
        completion("text", max_tokens=8),
        line("one in a list", COMPLETIONS, prompt=["only one"]),
        line("embed", "/v1/embeddings", input="text to embed"),
        line("responses", "/v1/responses", input="hello", max_output_tokens=8),
        line("stream", stream=True),
        line("get", method="GET"),
        line("no method", method=None),
        line("lower case", method="post"),
        line("other url", "/v2/chat"),
        line("whole url", f"https://api.example.com{CHAT}"),
        line("whole url of another", "https://api.example.com/v1/embeddings", input="x"),
        line("url of nothing", "http://[oops/v1/chat/completions"),
        line("list", COMPLETIONS, prompt=["one", "two"]),
        line("ids", COMPLETIONS, prompt=[1, 2, 3]),
        line("no prompt", COMPLETIONS),
        line("no url", None),
        {**line("number as url"), "url": 5},
        {**line("extra"), "comment": "of no known key", "body": {"messages": says("hi")}},
    ]
    job = batch_job(make_job, rows)
    out = run(job, 3)
    assert outcome(out) == {
        "chat": "done",
        "text": "done",
        "one in a list": "done",
        "embed": "unsupported_endpoint",
        "responses": "unsupported_endpoint",
        "stream": "done",
        "get": "bad_method",
        "no method": "bad_method",
        "lower case": "done",
        "other url": "unsupported_endpoint",
        "whole url": "done",
        "whole url of another": "unsupported_endpoint",
        "url of nothing": "unsupported_endpoint",
        "list": "unsupported_prompt",
        "ids": "unsupported_prompt",
        "no prompt": "null_prompt",
        "no url": "missing_url",
        "number as url": "missing_url",
        "extra": "done",
    }
    texts = {row["custom_id"]: row["text"] for row in out if row["status"] == "done"}
    assert texts == {
        "chat": "echo:ask chat",
        "text": "echo:go on text",
        "one in a list": "echo:only one",
        "stream": "echo:ask stream",
        "lower case": "echo:ask lower case",
        "whole url": "echo:ask whole url",
        "extra": "echo:hi",
    }
    assert [row["custom_id"] for row in out if row["warnings"]] == ["stream"]
    assert report(job)["warnings"] == {"not_streamed": 1}
    why = {json.loads(row["row"])["custom_id"]: row["error"] for row in job.failures()}
    for row_id in ("embed", "responses", "other url", "whole url of another", "url of nothing"):
        assert repr(next(row["url"] for row in rows if row["custom_id"] == row_id)) in why[row_id]
    assert "2 texts" in why["list"]
    assert "'GET'" in why["get"] or '"GET"' in why["get"]
    assert out[-1]["comment"] == "of no known key"


def test_47_without_a_chat_template_only_completions_are_done(make_job: MakeJob) -> None:
    job = batch_job(make_job, [line("chat"), completion("text")], input={"chat": False})
    out = run(job, 3)
    assert outcome(out) == {"chat": "unsupported_endpoint", "text": "done"}
    assert "input.chat: true" in job.failures()[0]["error"]


def test_many_lines_of_both_endpoints_get_their_own_answers(make_job: MakeJob) -> None:
    rows: list[Any] = []
    for i in range(900):
        kind = i % 5
        rows.append(
            completion(f"r{i}") if kind in (0, 3) else line(f"r{i}", "/v1/other") if kind == 4 else line(f"r{i}")
        )
    rows[444] = "{torn"
    job = batch_job(make_job, rows, engine={"stub": {"shuffle": True}, "replicas": 2})
    out = run(job, 3)
    for i, row in enumerate(out):
        if i == 444 or i % 5 == 4:
            assert row["status"] == "failed"
        else:
            assert row["text"] == f"echo:{'go on' if i % 5 in (0, 3) else 'ask'} r{i}"
    assert [row["position"] for row in job.failures()] == [i + 1 for i in range(900) if i == 444 or i % 5 == 4]


# ---- the model that a body names ----


def small_model(folder: Path) -> None:
    """A folder that is enough of a model for the stub: a tokenizer of a few words, and a context length."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "ask": 1}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir(parents=True)
    words.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"max_position_embeddings": 256}')


def named(*models: str | None) -> list[dict[str, Any]]:
    return [line(f"r{i}", **({} if model is None else {"model": model})) for i, model in enumerate(models)]


def test_48_all_lines_name_another_model(make_job: MakeJob) -> None:
    job = batch_job(make_job, named(*["cloud-mini"] * 4), model="my/model")
    small_model(job.folder / "my" / "model")
    ended = job.run()
    assert ended.code == 2, ended.err
    assert "cloud-mini (4 rows, first line 1) is not my/model" in ended.err
    assert "input.batch_model" in ended.err
    assert "Traceback" not in ended.err
    assert not (job.run_folder / "manifest.jsonl").exists() or not job.manifest("ready")
    assert not job.output.exists()
    out = run(job, 0, "--set", "input.batch_model=ignore")
    assert outcome(out) == {f"r{i}": "done" for i in range(4)}
    assert report(job)["model"] == "my/model"
    assert "my/model" in bulkgen("report", str(job.output)).out


def test_48_one_line_names_another_model(make_job: MakeJob) -> None:
    job = batch_job(make_job, named("my/model", None, "other/model", "my/model"), model="my/model")
    small_model(job.folder / "my" / "model")
    out = run(job, 3)
    assert outcome(out) == {"r0": "done", "r1": "done", "r2": "wrong_model", "r3": "done"}
    (failure,) = job.failures()
    assert "'other/model'" in failure["error"]
    assert "'my/model'" in failure["error"]
    assert json.loads(failure["row"])["custom_id"] == "r2"
    assert report(job)["refused_codes"] == {"wrong_model": 1}
    assert outcome(run(job, 0, "--set", "input.batch_model=ignore", "--changed", "keep"))["r2"] == "done"
    assert pending(job) == [3, 1]


def test_48_no_line_names_a_model(make_job: MakeJob) -> None:
    job = batch_job(make_job, named(None, None))
    assert outcome(run(job, 0)) == {"r0": "done", "r1": "done"}
    assert report(job)["model"] == "stub"


def test_48_several_wrong_models_in_several_files(make_job: MakeJob) -> None:
    job = batch_job(make_job, None, input={"path": "in"})
    (job.folder / "in").mkdir()
    job.write([line("a", model="one"), "[]"], "in/1.jsonl")
    job.write([line(str(i), model="two") for i in range(150)], "in/2.jsonl")
    ended = job.run()
    assert ended.code == 2
    assert "two (" in ended.err
    assert "first line 1 of in/2.jsonl" in ended.err
    assert "one (1 row, first line 1 of in/1.jsonl)" in ended.err
    assert "are not stub" in ended.err


# ---- Parquet, going on ----


def test_a_batch_in_parquet_is_the_same_batch(make_job: MakeJob) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    rows = [
        line("plain"),
        completion("text", max_tokens=5, logit_bias={"7": None}),
        line("json", response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}, n=2),
        line("object", response_format={"type": "json_object"}, temperature=1),
        line("tools", tools=[{"type": "function", "function": {"name": "f"}}]),
        line("two", messages=[{"role": "system", "content": "be kind"}, *says("hello")], stop=["a", "b"]),
        line("bias", logit_bias={"7": -1.0}),
    ]
    text = batch_job(make_job, rows, engine=ECHO)
    table = batch_job(make_job, None, input={"path": "in.parquet"}, engine=ECHO)
    # Each body is padded with nulls for the keys of all others, inside of its parts too.
    pq.write_table(pa.Table.from_pylist(rows), table.folder / "in.parquet")
    assert pq.read_table(table.folder / "in.parquet")["body"].to_pylist()[0]["response_format"] is None
    one, other = run(text, 3), run(table, 3)
    assert outcome(one) == outcome(other)
    assert outcome(other) == {
        "plain": "done", "text": "done", "json": "done", "object": "done", "two": "done",
        "tools": "unsupported_parameter", "bias": "unsupported_parameter",
    }  # fmt: skip
    assert sent(one) == sent(other)
    assert sent(other)["json"]["structured_outputs"] == {"json_schema": json.dumps(schema, separators=(",", ":"))}
    assert [row["row_key"] for row in one if row["status"] == "done"] == [
        row["row_key"] for row in other if row["status"] == "done"
    ]
    back = pq.read_table(table.output).select(["custom_id", "method", "url", "body"])
    assert back.equals(pq.read_table(table.folder / "in.parquet"))


def test_a_batch_goes_on_and_sends_nothing_twice(make_job: MakeJob) -> None:
    rows = [line(f"r{i:02d}", max_tokens=1 + i) if i % 2 else completion(f"r{i:02d}") for i in range(30)]
    stuck = {"max_num_seqs": 4, "stub": {"stuck": ["r28", "r29"]}}
    job = batch_job(make_job, rows, output={"commit_rows": 5, "commit_s": 0.1}, engine=stuck)
    process = job.start()
    wait_for_parts(job, 2, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    first = set(job.committed_keys())
    assert 0 < len(first) < 30
    again = job.run("--set", "engine.stub.stuck=[]")
    assert again.code == 0, again.err
    assert first < set(job.committed_keys())
    assert len(job.committed_keys()) == 30
    assert pending(job) == [30, 30 - len(first)]
    assert [row["text"] for row in job.rows()] == [f"echo:{'ask' if i % 2 else 'go on'} r{i:02d}" for i in range(30)]
    done = job.rows()
    assert run(job, 0) == done
    assert len(job.manifest("ready")) == 2
    rows[3]["body"]["temperature"] = 0.125  # one changed request, one new one, and keys that change no answer
    rows[5]["body"]["user"] = "somebody"
    job.write([*rows, line("new")])
    assert len(run(job, 0)) == 31
    assert pending(job)[-1] == 2


def test_rows_of_a_batch_are_rendered_by_their_id(make_job: MakeJob) -> None:
    job = batch_job(make_job, [line("a"), completion("b", max_tokens=3), line("c", n=0)])
    shown = bulkgen("render", str(job.path), "--row", "b")
    assert shown.code == 0, shown.err
    assert "max_tokens 3" in shown.out
    assert "go on b" in shown.out
    refused = bulkgen("render", str(job.path), "--row", "c")
    assert "refused: bad_sampling" in refused.out
