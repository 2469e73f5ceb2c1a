"""The job spec: what it resolves to, and one clear sentence for each way to get it wrong."""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from bulkgen.errors import RowError, SpecError
from bulkgen.records import RESULT_COLUMNS
from bulkgen.spec import JobSpec, check_collisions, check_sampling_value, load_spec, spec_json_schema
from bulkgen.spec.code import code_setting, code_variable

# Line numbers in the tables below count from here: name is line 1, sampling stands on line 4.
BASE = """\
name: summaries
model: demo
input: {path: in.jsonl, id: id, messages: messages}
sampling: {temperature: 0, max_tokens: {column: limit}}
output: {path: out/summaries.parquet, column: summary}
"""


def write(folder: Path, text: str, name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def load(folder: Path, text: str, overrides: Sequence[str] = ()) -> JobSpec:
    return load_spec(write(folder, text), overrides)


def complaint(folder: Path, text: str, overrides: Sequence[str] = ()) -> str:
    """The message of a spec that must not load, with the folder taken out of it."""
    with pytest.raises(SpecError) as caught:
        load(folder, text, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(f"{folder}/", "")


# ---- what a spec says ----


def test_a_spec_resolves_with_all_defaults(tmp_path: Path) -> None:
    spec = load(tmp_path, BASE)
    assert spec.source == tmp_path / "job.yaml"
    assert spec.base == tmp_path
    assert spec.input.paths == ("in.jsonl",)
    assert spec.output_path == tmp_path / "out/summaries.parquet"
    assert spec.sampling.constants() == {"temperature": 0.0, "max_tokens": 512}
    assert spec.sampling.columns() == {"max_tokens": "limit"}
    assert spec.engine.kind == "vllm"
    assert (spec.engine.replicas, spec.engine.max_restarts, spec.engine.vllm_args()) == (1, 3, {})
    assert (spec.shards.rows(), spec.shards.edges(), spec.price.usd_per_hour) == (None, None, None)
    resolved = spec.resolved()
    assert resolved["sampling"]["max_tokens"] == {"column": "limit"}
    assert resolved["output"]["commit_s"] == spec.output.commit_s
    assert json.loads(json.dumps(resolved)) == resolved
    assert yaml.safe_load(yaml.safe_dump(resolved)) == resolved


def test_a_resolved_spec_is_a_spec(tmp_path: Path) -> None:
    spec = load(tmp_path, BASE, ["engine.args.swap_space=4", "engine.env.OMP_NUM_THREADS=2", "sampling.stop=[a, b]"])
    again = load(tmp_path, yaml.safe_dump(spec.resolved()))
    assert again == spec
    assert again.spec_hash == spec.spec_hash


def test_everything_in_it_is_frozen(tmp_path: Path) -> None:
    spec = load(tmp_path, BASE)
    with pytest.raises(ValueError, match="frozen"):
        spec.name = "other"  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        spec.sampling.temperature = 1.0  # type: ignore[misc]


def test_paths_are_relative_to_the_spec_wherever_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    write(tmp_path, "max_num_seqs: 7\n", "engine.yaml")
    text = BASE.replace("path: out/", "path: ../out/") + "engine: {config: ../engine.yaml}\n"
    write(tmp_path / "jobs", text.replace("id: id,", "chat_template: ../chat.jinja,"))
    monkeypatch.chdir(tmp_path)
    spec = load_spec(Path("jobs/job.yaml"))
    assert spec.output_path == tmp_path / "out/summaries.parquet"
    assert spec.engine.max_num_seqs == 7
    monkeypatch.chdir("/")
    assert load_spec(tmp_path / "jobs/job.yaml").chat_template_text() == "{{ messages }}"


@pytest.mark.parametrize("path", ["out.parquet", "out", "out/", "out.v1/", "a.b/out", ".", "/tmp/out/"])
def test_an_output_is_a_parquet_file_or_a_folder(tmp_path: Path, path: str) -> None:
    assert load(tmp_path, BASE, [f"output.path={path}"]).output_path == Path(tmp_path / path)


def test_hash_follows_the_content_and_not_the_form(tmp_path: Path) -> None:
    spec = load(tmp_path, BASE)
    reordered = "# a comment\n" + "".join(reversed(BASE.splitlines(keepends=True)))
    assert load(tmp_path, reordered).spec_hash == spec.spec_hash
    assert load(tmp_path, BASE, ["sampling.temperature=0.0"]).spec_hash == spec.spec_hash
    assert load(tmp_path, BASE, ["price.usd_per_hour=1"]).spec_hash != spec.spec_hash


SAME_ROWS = [
    "price.usd_per_hour=3",
    "shards.target_rows=10",
    "engine.max_num_seqs=8",
    "engine.replicas=2",
    "output.path=elsewhere/",
    "output.column=other",
    "output.commit_rows=1",
    "input.path=[a.jsonl, b.jsonl]",
    "input.id=null",
    "input.allow_empty=true",
    "name=other",
]
OTHER_ROWS = [
    "model=org/model",
    "revision=main",
    "input.messages=chat",
    "input={path: in.jsonl, id: id, prompt: messages}",
    "input={path: in.jsonl, id: id, messages: messages, chat_template: chat.jinja}",
    "sampling.temperature=0.5",
    "sampling.max_tokens=512",
    "sampling.max_tokens={column: other}",
    "sampling.stop=END",
]


@pytest.mark.parametrize("override", SAME_ROWS)
def test_settings_that_leave_rows_the_same(tmp_path: Path, override: str) -> None:
    assert load(tmp_path, BASE, [override]).identity_settings() == load(tmp_path, BASE).identity_settings()


@pytest.mark.parametrize("override", OTHER_ROWS)
def test_settings_that_make_other_rows(tmp_path: Path, override: str) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    other = load(tmp_path, BASE, [override]).identity_settings()
    assert json.loads(json.dumps(other)) != load(tmp_path, BASE).identity_settings()


def test_a_chat_template_counts_by_its_text(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("one")
    text = BASE.replace("id: id,", "id: id, chat_template: chat.jinja,")
    one = load(tmp_path, text).identity_settings()
    template.rename(tmp_path / "same.jinja")
    assert load(tmp_path, text.replace("chat.jinja", "same.jinja")).identity_settings() == one
    (tmp_path / "same.jinja").write_text("two")
    assert load(tmp_path, text.replace("chat.jinja", "same.jinja")).identity_settings() != one
    (tmp_path / "same.jinja").write_bytes(b"\xff")
    spec = load(tmp_path, text.replace("chat.jinja", "same.jinja"))
    with pytest.raises(
        SpecError, match=r"job.yaml: input.chat_template: .*same.jinja cannot be read .*; give a text file"
    ):
        spec.chat_template_text()


@pytest.mark.parametrize(
    ("written", "value"),
    [("1e-3", 0.001), ("1.5E0", 1.5), ("-0.0", 0.0), ("2", 2.0), ("+1.5", 1.5)],
)
def test_numbers_are_read_as_everybody_writes_them(tmp_path: Path, written: str, value: float) -> None:
    assert load(tmp_path, BASE.replace("temperature: 0", f"temperature: {written}")).sampling.temperature == value


def test_what_looks_like_a_date_is_a_name(tmp_path: Path) -> None:
    assert load(tmp_path, BASE.replace("name: summaries", "name: 2026-01-31")).name == "2026-01-31"


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_bytes(b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode())
    assert load_spec(tmp_path / "job.yaml").name == "summaries"


# ---- engine settings from a file ----

CONFIG = """\
dtype: bfloat16
max_num_seqs: 256
env:
  VLLM_CPU_KVCACHE_SPACE: 2
  OMP_NUM_THREADS: "1"
args: {swap_space: 4, load_format: dummy}
"""


def test_the_jobs_own_engine_settings_win_over_its_config_file(tmp_path: Path) -> None:
    write(tmp_path, CONFIG, "cpu.yaml")
    own = "engine: {config: cpu.yaml, max_num_seqs: 8, env: {OMP_NUM_THREADS: 2}, args: {load_format: auto}}\n"
    engine = load(tmp_path, BASE + own, ["engine.replicas=2"]).engine
    assert engine.vllm_args() == {"dtype": "bfloat16", "max_num_seqs": 8, "swap_space": 4, "load_format": "auto"}
    assert engine.environment() == {"VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": "2"}
    assert engine.replicas == 2


def test_set_wins_over_both_and_can_name_another_config_or_none(tmp_path: Path) -> None:
    write(tmp_path, CONFIG, "cpu.yaml")
    write(tmp_path, "dtype: float32\n", "other.yaml")
    text = BASE + "engine: {config: cpu.yaml}\n"
    assert load(tmp_path, text, ["engine.max_num_seqs=1"]).engine.max_num_seqs == 1
    assert load(tmp_path, text, ["engine.config=other.yaml"]).engine.vllm_args() == {"dtype": "float32"}
    assert load(tmp_path, text, ["engine.config=null"]).engine.vllm_args() == {}


def test_stub_faults(tmp_path: Path) -> None:
    text = BASE + "engine: {kind: stub, stub: {seed: 3, fail_rate: 0.5, die_at: [10, 20], shuffle: true}}\n"
    stub = load(tmp_path, text, ["model=stub", "engine.stub.step_s=0.01"]).engine.stub
    assert (stub.seed, stub.fail_rate, stub.die_at, stub.shuffle, stub.step_s) == (3, 0.5, [10, 20], True, 0.01)
    assert stub.output_tokens is None


# ---- --set ----


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("sampling.temperature=0.2", ("sampling", "temperature"), 0.2),
        ("sampling.stop=[a, b]", ("sampling", "stop"), ["a", "b"]),
        ("sampling.max_tokens={column: n}", ("sampling", "max_tokens"), {"column": "n"}),
        ("input.id=null", ("input", "id"), None),
        ("input.id=", ("input", "id"), None),
        ("price.usd_per_hour=2.5", ("price", "usd_per_hour"), 2.5),
        ("engine.args.speculative_config={method: ngram}", ("engine", "args", "speculative_config", "method"), "ngram"),
        ("name='a=b'", ("name",), "a=b"),
        ("name=a=b", ("name",), "a=b"),
    ],
)
def test_set_overrides_any_key(tmp_path: Path, override: str, path: tuple[str, ...], value: Any) -> None:
    found: Any = load(tmp_path, BASE, [override]).resolved()
    for part in path:
        found = found[part]
    assert found == value


def test_set_fills_a_section_whose_keys_are_commented_out_and_the_last_one_wins(tmp_path: Path) -> None:
    spec = load(tmp_path, BASE + "price:\n  # usd_per_hour: 1\n", ["price.usd_per_hour=2", "price.usd_per_hour=3"])
    assert spec.price.usd_per_hour == 3


# ---- wrong specs: --set (or None), what it replaces in BASE, the whole message ----

NEITHER = "is neither a file ending in .parquet nor a folder; give a file such as out.parquet, or a folder such as out/"
NO_KEY = "cannot be a key; a key is text, in quotes where YAML takes it for more"
NO_YAML = "text with special characters needs quotes"
ARGS = "(vLLM's other settings go under engine.args)"

WRONG: dict[str, tuple[str, str, str]] = {
    "unknown key": (
        "temperature: 0",
        "temprature: 0",
        "job.yaml:4: unknown key 'temprature' in sampling; did you mean 'temperature'?",
    ),
    "unknown key at the top": (
        "name: summaries",
        "name: s\nmodle: x",
        "job.yaml:2: unknown key 'modle'; did you mean 'model'?",
    ),
    "misspelt key that must be there": ("name:", "nam:", "job.yaml:1: unknown key 'nam'; did you mean 'name'?"),
    "key of another section": (
        "column: summary",
        "target_rows: 5",
        "job.yaml:5: unknown key 'target_rows' in output; did you mean shards.target_rows?",
    ),
    "key of the top in a section": (
        "column: summary",
        "revision: main",
        "job.yaml:5: unknown key 'revision' in output; did you mean revision?",
    ),
    "key like no other": (
        "column: summary",
        "zzz: 5",
        "job.yaml:5: unknown key 'zzz' in output; there are path, column, commit_rows, commit_s, file_rows, private",
    ),
    "unknown key in a column": (
        "{column: limit}",
        "{colum: limit}",
        "job.yaml:4: unknown key 'colum' in sampling.max_tokens; did you mean 'column'?",
    ),
    "key twice": (
        "model: demo",
        "model: demo\nname: x",
        "job.yaml:3: name stands twice, first at job.yaml:1; remove one",
    ),
    "key twice in a section": (
        "temperature: 0,",
        "temperature: 0, temperature: 1,",
        "job.yaml:4: sampling.temperature stands twice, first at job.yaml:4; remove one",
    ),
    "key missing": ("model: demo\n", "", "job.yaml:1: model is missing; add it"),
    "key missing in a section": ("path: in.jsonl, ", "", "job.yaml:3: input.path is missing; add it"),
    "number as name": (
        "summaries\n",
        "2026\n",
        "job.yaml:1: name must be text, not 2026; put it in quotes if text is meant",
    ),
    "yes as column": (
        "column: summary",
        "column: no",
        "job.yaml:5: output.column must be text, not false; put it in quotes if text is meant",
    ),
    "nothing as name": ("name: summaries", "name:", "job.yaml:1: name must be text, not null"),
    "empty name": ("name: summaries", "name: ''", "job.yaml:1: name must be text that is not empty, not ''"),
    "list as name": ("name: summaries", "name: [a]", 'job.yaml:1: name must be text, not ["a"]'),
    "text as number": (
        "temperature: 0",
        "temperature: hot",
        "job.yaml:4: sampling.temperature must be a number or {column: NAME}, not 'hot'",
    ),
    "list as section": (
        "{temperature: 0, max_tokens: {column: limit}}",
        "[1]",
        "job.yaml:4: sampling must be a section with keys of its own, not [1]",
    ),
    "empty section": (
        "{temperature: 0, max_tokens: {column: limit}}",
        "",
        "job.yaml:4: sampling must be a section with keys of its own, not null",
    ),
    "negative temperature": (
        "temperature: 0",
        "temperature: -1",
        "job.yaml:4: sampling.temperature must be 0 or more, not -1",
    ),
    "high temperature": (
        "temperature: 0",
        "temperature: 2.5",
        "job.yaml:4: sampling.temperature must be 2 or less, not 2.5",
    ),
    "no number": (
        "temperature: 0",
        "temperature: .nan",
        "job.yaml:4: sampling.temperature must be a finite number, not NaN",
    ),
    "column is a number": (
        "{column: limit}",
        "{column: 5}",
        "job.yaml:4: sampling.max_tokens.column must be text, not 5; put it in quotes if text is meant",
    ),
    "column of no name": ("{column: limit}", "{}", "job.yaml:4: sampling.max_tokens.column is missing; add it"),
    "max_tokens 0": ("{column: limit}", "0", "job.yaml:4: sampling.max_tokens must be 1 or more, not 0"),
    "max_tokens 1.5": (
        "{column: limit}",
        "1.5",
        "job.yaml:4: sampling.max_tokens must be a whole number or {column: NAME}, not 1.5",
    ),
    "max_tokens huge": (
        "{column: limit}",
        "3000000000",
        "job.yaml:4: sampling.max_tokens must be 2147483647 or less, not 3000000000",
    ),
    "min_tokens over max_tokens": (
        "{column: limit}",
        "5, min_tokens: 6",
        "job.yaml:4: sampling.min_tokens: 6 is more than max_tokens, which is 5; lower it or raise max_tokens",
    ),
    "empty stop": (
        "temperature: 0",
        "stop: ['a', '']",
        "job.yaml:4: sampling.stop.1 must be text that is not empty, not ''",
    ),
    "no input path": ("path: in.jsonl", "path: []", "job.yaml:3: input.path must be a list that is not empty, not []"),
    "input path a number": (
        "path: in.jsonl",
        "path: 5",
        "job.yaml:3: input.path must be text or a list, not 5; put it in quotes if text is meant",
    ),
    "input path with a number": (
        "path: in.jsonl",
        "path: [in.jsonl, 5]",
        "job.yaml:3: input.path.1 must be text, not 5; put it in quotes if text is meant",
    ),
    "no prompt": (
        ", messages: messages",
        "",
        "job.yaml:3: input: needs exactly one of messages, prompt, template and batch; there is none",
    ),
    "two prompts": (
        "messages: messages",
        "messages: messages, prompt: text",
        "job.yaml:3: input: needs exactly one of messages, prompt, template and batch; there are messages and prompt",
    ),
    "system with messages": (
        "messages: messages}",
        "messages: messages,\n  system: Hi}",
        "job.yaml:4: input.system: goes with prompt or template; messages bring their own system message",
    ),
    "messages without chat": (
        "id: id,",
        "chat: false,",
        "job.yaml:3: input.messages: needs chat: true; with chat: false the prompt is sent as plain text",
    ),
    "system without chat": (
        "messages: messages",
        "prompt: text, chat: false, system: Hi",
        "job.yaml:3: input.system: needs chat: true; with chat: false the prompt is sent as plain text",
    ),
    "no such chat template": (
        "id: id,",
        "chat_template: no.jinja,",
        "job.yaml:3: input.chat_template: no.jinja does not exist; give a file, relative to the spec",
    ),
    "output of another kind": (
        "out/summaries.parquet",
        "out/summaries.csv",
        f"job.yaml:5: output.path: 'out/summaries.csv' {NEITHER}",
    ),
    "output both": (
        "out/summaries.parquet",
        "out.parquet/",
        f"job.yaml:5: output.path: 'out.parquet/' {NEITHER}",
    ),
    "output without a name": (
        "out/summaries.parquet",
        "out/.parquet",
        f"job.yaml:5: output.path: 'out/.parquet' {NEITHER}",
    ),
    "output column of our own": (
        "column: summary",
        "column: status",
        "job.yaml:5: output.column: 'status' is a column that bulkgen writes itself; choose another name",
    ),
    "model stub on vllm": (
        "model: demo",
        "model: stub",
        "job.yaml:2: model: 'stub' has no weights; set engine.kind: stub, or name a model",
    ),
    "number as key": (
        "model: demo",
        "1: demo",
        f"job.yaml:2: '1' {NO_KEY}",
    ),
    "on as key": (
        "model: demo",
        "on: demo",
        f"job.yaml:2: 'on' {NO_KEY}",
    ),
    "merge key": (
        "model: demo",
        "<<: {model: demo}",
        f"job.yaml:2: '<<' {NO_KEY}",
    ),
    "list as key": (
        "model: demo",
        "? [a]\n: demo",
        f"job.yaml:2: a list or mapping {NO_KEY}",
    ),
    "alias": (
        "model: demo",
        "model: &m demo\nrevision: *m",
        "job.yaml:2: revision: aliases (*name) are not supported; write the value out",
    ),
    "recursion": (
        "model: demo",
        "model: &m [*m]",
        "job.yaml:2: model.0: aliases (*name) are not supported; write the value out",
    ),
    "tag of Python": (
        "model: demo",
        "model: !!python/name:os.system ''",
        "job.yaml:2: model: the tag !!python/name:os.system is not supported; remove it",
    ),
    "tag of a set": (
        "model: demo",
        "model: !!set {a, b}",
        "job.yaml:2: model: the tag !!set is not supported; remove it",
    ),
    "tag that lies": (
        "model: demo",
        "model: !!int many",
        "job.yaml:2: model: 'many' is not a value that YAML can read",
    ),
    "number of many bits": (
        "temperature: 0",
        "seed: 99999999999999999999",
        "job.yaml:4: sampling.seed: the number is too large (more than 63 bits)",
    ),
    "number of many digits": (
        "temperature: 0",
        f"seed: {'9' * 5000}",
        f"job.yaml:4: sampling.seed: '{'9' * 40}' is not a value that YAML can read",
    ),
    "nested without end": ("model: demo", f"model: {'[' * 1000}", "job.yaml:1: is nested too deeply for a spec"),
    "bracket left open": (
        "messages: messages}",
        "messages: messages",
        f"job.yaml:4:9: is not valid YAML (expected ',' or '}}', but got ':'); {NO_YAML}",
    ),
    "tab": (
        "model: demo",
        "model:\n\tdemo",
        f"job.yaml:3:1: is not valid YAML (found character '\\t' that cannot start any token); {NO_YAML}",
    ),
    "two documents": (
        "model: demo",
        "---\nmodel: demo",
        f"job.yaml:2:1: is not valid YAML (but found another document); {NO_YAML}",
    ),
    "control character": ("model: demo", "model: de\x07mo", "job.yaml:2: holds a control character (0x7); remove it"),
}

WRONG_SECTIONS: dict[str, tuple[str, str]] = {
    "price": ("price: {usd_per_hour: -2.5}", "price.usd_per_hour must be 0 or more, not -2.5"),
    "price infinite": ("price: {usd_per_hour: .inf}", "price.usd_per_hour must be a finite number, not Infinity"),
    "price with a sign": ("price: {usd_per_hour: $2}", "price.usd_per_hour must be a number, not '$2'"),
    "replicas": ("engine: {replicas: 0}", "engine.replicas must be 1 or more, not 0"),
    "replicas true": ("engine: {replicas: true}", "engine.replicas must be a whole number, not true"),
    "kind": ("engine: {kind: vlm}", "engine.kind must be 'vllm' or 'stub', not 'vlm'"),
    "eager": ("engine: {enforce_eager: 1}", "engine.enforce_eager must be true or false, not 1"),
    "memory": ("engine: {gpu_memory_utilization: 90}", "engine.gpu_memory_utilization must be 1 or less, not 90"),
    "no memory": ("engine: {gpu_memory_utilization: 0}", "engine.gpu_memory_utilization must be more than 0, not 0"),
    "unnamed vllm setting": (
        "engine: {swap_space: 4}",
        "unknown key 'swap_space' in engine; there are config, kind, replicas, max_restarts, max_attempts, "
        "start_timeout_s, stall_s, row_timeout_s, max_model_len, max_num_seqs, max_num_batched_tokens, block_size, "
        "gpu_memory_utilization, kv_cache_memory_bytes, kv_cache_dtype, dtype, quantization, enforce_eager, "
        "enable_prefix_caching, enable_chunked_prefill, tensor_parallel_size, seed, args, "
        f"env, stub {ARGS}",
    ),
    "misspelt vllm setting": (
        "engine: {max_modle_len: 4}",
        f"unknown key 'max_modle_len' in engine; did you mean 'max_model_len'? {ARGS}",
    ),
    "named setting in args": (
        "engine: {args: {max_num_seqs: 4}}",
        "engine.args.max_num_seqs: has a key of its own; write it as engine.max_num_seqs",
    ),
    "revision in args": (
        "engine: {args: {revision: x}}",
        "engine.args.revision: has a key of its own; write it as revision",
    ),
    "args": ("engine: {args: [a]}", 'engine.args must be a section of keys and values, not ["a"]'),
    "environment": (
        "engine: {env: {A: true}}",
        "engine.env.A must be text or a whole number or a number, not true; put it in quotes if text is meant",
    ),
    "environment name": (
        "engine: {env: {'A=B': 1}}",
        "engine.env.A=B: is no name that an environment variable can have; write NAME: value",
    ),
    "code of a model": (
        "engine: {args: {trust_remote_code: true}}",
        "engine.args.trust_remote_code: would run code that is not vLLM's own, and a job brings none; remove it",
    ),
    "code of a class": (
        "engine: {args: {compilation_config: {inductor_passes: {post: a.b}}}}",
        "engine.args.compilation_config.inductor_passes: would run code that is not vLLM's own, and a job brings none; "
        "remove it",
    ),
    "code of an executor": (
        "engine: {args: {distributed_executor_backend: mine.Executor}}",
        "engine.args.distributed_executor_backend: would run code that is not vLLM's own, and a job brings none; "
        "remove it",
    ),
    "code of a library": (
        "engine: {env: {LD_PRELOAD: ./x.so}}",
        "engine.env.LD_PRELOAD: could bring in code, and a job brings none; set it in the environment of the command "
        "itself",
    ),
    "stub without stub": (
        "engine: {stub: {seed: 1}}",
        "engine.stub: needs engine.kind: stub; remove it or set the kind",
    ),
    "fail rate": ("engine: {kind: stub, stub: {fail_rate: 2}}", "engine.stub.fail_rate must be 1 or less, not 2"),
    "die at": ("engine: {kind: stub, stub: {die_at: [5, 0]}}", "engine.stub.die_at.1 must be 1 or more, not 0"),
    "start": (
        "engine: {kind: stub, stub: {start_s: .inf}}",
        "engine.stub.start_s must be a finite number, not Infinity",
    ),
    "shards": ("shards: {target_rows: 0}", "shards.target_rows must be 1 or more or 'auto', not 0"),
    "buckets": ("shards: {buckets: [0, 64]}", "shards.buckets.0 must be 1 or more, not 0"),
    "no buckets": ("shards: {buckets: []}", "shards.buckets must be a list that is not empty or 'auto', not []"),
    "config": ("engine: {config: no.yaml}", "engine.config: no.yaml does not exist; give a file, relative to the spec"),
    "config folder": ("engine: {config: .}", "engine.config: . is a folder; give a file, relative to the spec"),
    "config number": ("engine: {config: 5}", "engine.config must be text, not 5; put it in quotes if text is meant"),
}

WRONG_SETS: dict[str, tuple[str, str]] = {
    "value": ("sampling.temperature=-1", "sampling.temperature must be 0 or more, not -1"),
    "key": ("sampling.temprature=0", "unknown key 'temprature' in sampling; did you mean 'temperature'?"),
    "section": ("samplin.temperature=0", "unknown key 'samplin'; did you mean 'sampling'?"),
    "inner value": ("shards={buckets: [0]}", "shards.buckets.0 must be 1 or more, not 0"),
    "inner key": ("engine.stub={sed: 1}", "unknown key 'sed' in engine.stub; did you mean 'seed'?"),
    "under a value": ("name.first=x", "name is a value and has no key 'first'; set it as a whole"),
    "under a list item": ("input.path.0=x", "input.path is a value and has no key '0'; set it as a whole"),
    "twice": (
        "sampling={top_k: 1, top_k: 2}",
        "top_k stands twice, first at --set sampling={top_k: 1, top_k: 2}; remove one",
    ),
    "config": ("engine.config=no.yaml", "engine.config: no.yaml does not exist; give a file, relative to the spec"),
}


@pytest.mark.parametrize(("old", "new", "message"), WRONG.values(), ids=WRONG)
def test_wrong_specs(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in BASE
    assert complaint(tmp_path, BASE.replace(old, new, 1)) == message


@pytest.mark.parametrize(("section", "message"), WRONG_SECTIONS.values(), ids=WRONG_SECTIONS)
def test_wrong_sections(tmp_path: Path, section: str, message: str) -> None:
    assert complaint(tmp_path, f"{BASE}{section}\n").replace(str(tmp_path), ".") == f"job.yaml:6: {message}"


@pytest.mark.parametrize(("override", "message"), WRONG_SETS.values(), ids=WRONG_SETS)
def test_wrong_sets(tmp_path: Path, override: str, message: str) -> None:
    assert complaint(tmp_path, BASE, [override]) == f"--set {override}: {message}"


@pytest.mark.parametrize("override", ["", "name", "=x", "a..b=1", ".=1"])
def test_a_set_must_look_like_one(tmp_path: Path, override: str) -> None:
    assert complaint(tmp_path, BASE, [override]) == f"--set {override}: must look like sampling.temperature=0.2"


def test_a_set_that_is_not_yaml_says_so(tmp_path: Path) -> None:
    assert complaint(tmp_path, BASE, ["input.template={{ text }}"]) == (
        f"--set input.template={{{{ text }}}}: a list or mapping {NO_KEY}"
    )
    assert complaint(tmp_path, BASE, ["name=a: b: c"]).startswith("--set name=a: b: c: is not valid YAML (mapping")
    assert complaint(tmp_path, BASE, [f"name=[{'x' * 1000}"]).startswith(f"--set name=[{'x' * 56}...: is not")


def test_several_faults_are_told_together_and_the_rest_counted(tmp_path: Path) -> None:
    text = BASE.replace("temperature: 0", "temprature: 0").replace("column: summary", "column: row_key")
    assert complaint(tmp_path, text, ["price.usd_per_hour=-1"]).splitlines() == [
        "job.yaml:4: unknown key 'temprature' in sampling; did you mean 'temperature'?",
        "job.yaml:5: output.column: 'row_key' is a column that bulkgen writes itself; choose another name",
        "--set price.usd_per_hour=-1: price.usd_per_hour must be 0 or more, not -1",
    ]
    lines = complaint(tmp_path, BASE + "shards: {buckets: [0, 0, 0, 0, 0, 0, 0, 0]}\n").splitlines()
    assert len(lines) == 7
    assert lines[-1] == "and 2 more"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("max_num_seqs: 1\nmax_modle_len: 5\n", "e.yaml:2: unknown key 'max_modle_len' in engine; did you mean"),
        ("max_num_seqs: 1\nenv: {A: [1]}\n", "e.yaml:2: engine.env.A must be text or"),
        ("block_size: 0\n", "e.yaml:1: engine.block_size must be 1 or more, not 0"),
        ("config: other.yaml\n", "e.yaml:1: a config file cannot name another one; put all settings in it"),
        ("dtype: a\ndtype: b\n", "e.yaml:2: dtype stands twice, first at e.yaml:1; remove one"),
        ("args: {seed: 1}\n", "e.yaml:1: engine.args.seed: has a key of its own; write it as engine.seed"),
        ("- a\n", "e.yaml: must hold keys and values, such as `name: summaries`, not list"),
        ("# nothing\n", "e.yaml: is empty; write the keys into it, one a line"),
    ],
)
def test_wrong_config_files_are_named_themselves(tmp_path: Path, config: str, message: str) -> None:
    write(tmp_path, config, "e.yaml")
    assert complaint(tmp_path, BASE + "engine: {config: e.yaml}\n").startswith(message)


def test_files_that_are_no_spec(tmp_path: Path) -> None:
    def refuses(path: Path, *parts: str) -> None:
        with pytest.raises(SpecError) as caught:
            load_spec(path)
        assert str(caught.value) == f"{path}{''.join(parts)}"

    refuses(tmp_path / "no.yaml", ": cannot be read (No such file or directory); give the path of a YAML file")
    refuses(tmp_path, ": cannot be read (Is a directory); give the path of a YAML file")
    refuses(write(tmp_path, ""), ": is empty; write the keys into it, one a line")
    refuses(write(tmp_path, "# only a comment\n"), ": is empty; write the keys into it, one a line")
    refuses(write(tmp_path, "- a\n- b\n"), ": must hold keys and values, such as `name: summaries`, not list")
    refuses(write(tmp_path, "hello"), ": must hold keys and values, such as `name: summaries`, not str")
    refuses(write(tmp_path, "x" * 2_000_000), ": is larger than 1 MiB, too large for a spec; is it a data file?")
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("name: für".encode("latin-1"))
    refuses(latin, ": is not UTF-8 (byte 7); save it as UTF-8")


def test_a_file_made_of_aliases_is_refused_at_once(tmp_path: Path) -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 10}]\n" for i in range(1, 40))
    assert complaint(tmp_path, bomb) == "job.yaml:1: a1.0: aliases (*name) are not supported; write the value out"


# ---- sampling parameters from columns ----


@pytest.mark.parametrize(
    ("param", "value", "checked"),
    [
        ("temperature", 0, 0.0),
        ("max_tokens", 5, 5),
        ("max_tokens", 5.0, 5),
        ("top_k", -1, -1),
        ("seed", -(2**63), -(2**63)),
        ("stop", "END", "END"),
        ("stop", ["a", "b"], ["a", "b"]),
        ("stop", [], []),
    ],
)
def test_values_from_columns(param: str, value: Any, checked: Any) -> None:
    result = check_sampling_value(param, value)
    assert (result, type(result)) == (checked, type(checked))


@pytest.mark.parametrize(
    ("param", "value", "message"),
    [
        ("max_tokens", 0, "sampling.max_tokens must be 1 or more; the row's column has 0"),
        ("max_tokens", 0.0, "sampling.max_tokens must be 1 or more; the row's column has 0"),
        ("max_tokens", 1.5, "sampling.max_tokens must be a whole number; the row's column has 1.5"),
        ("max_tokens", True, "sampling.max_tokens must be a whole number; the row's column has true"),
        ("max_tokens", "9", "sampling.max_tokens must be a whole number; the row's column has '9'"),
        ("max_tokens", 1e300, "sampling.max_tokens must be 2147483647 or less; the row's column has 1"),
        ("max_tokens", math.nan, "sampling.max_tokens must be a whole number; the row's column has NaN"),
        (
            "max_tokens",
            {"column": "x"},
            'sampling.max_tokens must be a whole number; the row\'s column has {"column": "x"}',
        ),
        ("temperature", math.inf, "sampling.temperature must be a finite number; the row's column has Infinity"),
        ("temperature", b"1", "sampling.temperature must be a number; the row's column has \"b'1'\""),
        ("temperature", None, "sampling.temperature must be a number; the row's column has null"),
        ("stop", ["a", ""], 'sampling.stop must be text that is not empty; the row\'s column has ["a", ""]'),
        ("stop", 5, "sampling.stop must be text or a list; the row's column has 5"),
        ("stop", "", "sampling.stop must be text that is not empty; the row's column has ''"),
    ],
)
def test_values_from_columns_that_cannot_be_sent(param: str, value: Any, message: str) -> None:
    with pytest.raises(RowError) as caught:
        check_sampling_value(param, value)
    assert caught.value.code == "bad_sampling"
    assert caught.value.message.startswith(message)
    assert len(caught.value.message) < 200


def spec_with(param: str, value: Any) -> bool:
    """Whether a spec may have this value."""
    source = {"name": "n", "model": "m", "input": {"path": "p", "prompt": "p"}, "output": {"path": "o"}}
    try:
        JobSpec.model_validate({**source, "sampling": {"max_tokens": 2**31 - 1, param: value}})
    except ValueError:
        return False
    return True


def row_with(param: str, value: Any) -> bool:
    """Whether a row may have this value."""
    try:
        check_sampling_value(param, value)
    except RowError:
        return False
    return True


PARAMS = sorted(spec_json_schema()["$defs"]["SamplingSpec"]["properties"])
EDGES = [
    -(2**63),
    -3,
    -2,
    -1,
    0,
    0.5,
    1,
    1.5,
    2,
    2.5,
    2**31 - 1,
    2**31,
    math.inf,
    math.nan,
    "",
    "x",
    [],
    [""],
    ["x"],
    True,
]


@pytest.mark.parametrize("param", PARAMS)
def test_rows_and_specs_have_the_same_ranges(param: str) -> None:
    assert [row_with(param, value) for value in EDGES] == [spec_with(param, value) for value in EDGES]


@pytest.mark.real
@pytest.mark.parametrize("param", PARAMS)
def test_what_a_spec_may_have_vllm_takes(param: str) -> None:
    vllm = pytest.importorskip("vllm")
    for value in [v for v in EDGES if spec_with(param, v)]:
        vllm.SamplingParams(**{"max_tokens": 2**31 - 1, param: value})


# ---- names of columns ----


def test_columns_that_would_be_there_twice(tmp_path: Path) -> None:
    spec = load(tmp_path, BASE)
    check_collisions(spec, ["id", "messages", "text", "Status"])
    with pytest.raises(
        SpecError, match=r"job.yaml: output.column 'summary' is a column of the input already; set output"
    ):
        check_collisions(spec, ["id", "summary"])
    for name in ("status", *RESULT_COLUMNS):
        with pytest.raises(SpecError, match=rf"column '{name}' of the input .* bulkgen writes; rename it in the input"):
            check_collisions(spec, [name])


# ---- schema, examples, imports ----


def test_the_schema_knows_every_key_and_no_inner_thing() -> None:
    schema = spec_json_schema()
    json.dumps(schema)
    assert set(schema["properties"]) == {
        "name", "model", "revision", "input", "sampling", "output", "engine", "shards", "price",
        "repeats", "cache", "reuse",
    }  # fmt: skip
    assert schema["required"] == ["name", "model", "input", "output"]
    assert schema["additionalProperties"] is False
    assert {"sampling", "price"} <= set(schema["properties"])


@pytest.mark.parametrize(("text", "size"), [("500MB", 500_000_000), ("2GiB", 2 << 30), (4096, 4096)])
def test_sizes_as_people_write_them(tmp_path: Path, text: str | int, size: int) -> None:
    spec = load(tmp_path, BASE, ["cache.path=answers.cache", f"cache.max_bytes={text}", "reuse=[../old.parquet]"])
    assert spec.cache.max_bytes == size
    assert spec.cache_path == tmp_path / "answers.cache"
    assert spec.reuse_paths == [tmp_path.parent / "old.parquet"]


@pytest.mark.parametrize("text", ["0", "-1", "much", "3 parsecs"])
def test_sizes_that_are_none(tmp_path: Path, text: str) -> None:
    with pytest.raises(SpecError, match=r"cache\.max_bytes"):
        load(tmp_path, BASE, ["cache.path=answers.cache", f"cache.max_bytes={text}"])


REPOSITORY = Path(__file__).parent.parent


@pytest.mark.parametrize("job", sorted((REPOSITORY / "jobs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_example_jobs_load(job: Path) -> None:
    assert load_spec(job).name == job.stem


@pytest.mark.parametrize("config", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_configs_load(tmp_path: Path, config: Path) -> None:
    engine = load(tmp_path, BASE, [f"engine.config={config}"]).engine
    assert engine.vllm_args()


def test_reading_a_spec_imports_nothing_heavy() -> None:
    code = "import sys, bulkgen.spec; print([m for m in sys.modules if '.' not in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "vllm", "transformers", "pyarrow", "polars", "numpy", "jinja2", "typer", "rich"}
    assert heavy.isdisjoint(yaml.safe_load(done.stdout))


HARMLESS = {
    "trust_remote_code": False,
    "distributed_executor_backend": "uni",
    "attention_config": {"backend": "FLASH_ATTN"},
    "compilation_config": {"backend": "inductor", "level": 3},
    "logits_processors": None,
}


def test_settings_that_name_no_code_pass() -> None:
    assert code_setting(HARMLESS) is None
    assert (
        code_variable({"VLLM_CPU_KVCACHE_SPACE": 1, "OMP_NUM_THREADS": 2, "HF_TOKEN": "x", "NCCL_DEBUG": "INFO"})
        is None
    )


@pytest.mark.parametrize(
    "args",
    [
        {"trust_remote_code": "true"},
        {"worker_cls": "a.B"},
        {"scheduler_cls": "a.B"},
        {"logits_processors": ["a:B"]},
        {"io_processor_plugin": "x"},
        {"reasoning_parser_plugin": "x.py"},
        {"kv_transfer_config": {"kv_connector_module_path": "a.b"}},
        {"compilation_config": {"backend": "a.b.C"}},
        {"ec_manager_config": {"manager_cls": "a.B"}},
        {"log_config_file": "log.json"},
        {"compilation_config": {"inductor_compile_config": {"cpp.cxx": ["x"]}}},
    ],
)
def test_settings_that_name_code(args: dict[str, Any]) -> None:
    place = code_setting(args)
    assert place is not None
    assert place[0] == next(iter(args))


@pytest.mark.parametrize(
    "name",
    [
        *("PYTHONPATH", "ld_preload", "PATH", "CXX", "BASH_ENV", "NCCL_NET_PLUGIN", "VLLM_NCCL_SO_PATH"),
        *("HOME", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HF_ENDPOINT"),
    ],
)
def test_variables_that_bring_in_code(name: str) -> None:
    assert code_variable({"OMP_NUM_THREADS": 2, name: "x"}) == name
