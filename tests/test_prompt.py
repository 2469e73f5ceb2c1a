"""Prompts: what is sent for a row, why a row cannot be sent, and what makes it the same row again."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bulkgen.engine.demo_model import prepare_demo_model
from bulkgen.errors import SpecError, Stopped
from bulkgen.prompt import Model, PromptSource, Renderer, open_model
from bulkgen.prompt.sandbox import Limits
from bulkgen.prompt.tokenizer import StubTokenizer
from bulkgen.records import BadRow, Prompt, RefusedRow, RowBatch
from bulkgen.spec import check_sampling_value

STUB = open_model("stub", None, None)


@pytest.fixture(scope="module")
def demo() -> Model:
    return open_model("demo", None, prepare_demo_model(print))


def renderer(
    model: Model = STUB,
    columns: dict[str, str] | None = None,
    constants: dict[str, Any] | None = None,
    max_model_len: int = 1000,
    limits: Limits | None = None,
    **source: Any,
) -> Renderer:
    return Renderer(
        model,
        PromptSource(**source) if source.keys() & {"messages", "template"} else PromptSource(prompt="p", **source),
        constants={"temperature": 0, "max_tokens": 16, **(constants or {})},
        columns=columns or {},
        check=check_sampling_value,
        max_model_len=max_model_len,
        limits=limits,
    )


def render(r: Renderer, *rows: Any, first: int = 0, file: str = "in.jsonl") -> list[Prompt | RefusedRow]:
    return r.render(RowBatch(first, file, range(first + 1, first + 1 + len(rows)), rows))


def texts(r: Renderer, *rows: Any) -> list[str]:
    return [r.text(x.tokens) if isinstance(x, Prompt) else f"{x.code}: {x.message}" for x in render(r, *rows)]


def codes(r: Renderer, *rows: Any) -> list[str | None]:
    return [x.code if isinstance(x, RefusedRow) else None for x in render(r, *rows)]


def test_a_batch_comes_back_in_order_with_refusals_in_their_places() -> None:
    out = render(renderer(), {"p": "one"}, BadRow("bad_json", "torn", b"{"), {"p": None}, {"p": "two"}, first=7)
    assert [x.ordinal for x in out] == [7, 8, 9, 10]
    assert [type(x).__name__ for x in out] == ["Prompt", "RefusedRow", "RefusedRow", "Prompt"]
    assert isinstance(out[1], RefusedRow)
    assert (out[1].raw, out[1].position, out[1].row) == (b"{", 9, None)


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({}, "missing_column"),
        ({"p": None}, "null_prompt"),
        ({"p": ""}, "empty_prompt"),
        ({"p": " \n\t"}, "empty_prompt"),
        ({"p": 5}, "not_text"),
        ({"p": False}, "not_text"),
        ({"p": ["a", "b"]}, "not_text"),
        ({"p": b"bytes"}, "not_text"),
        ({"p": "0"}, None),
    ],
)
def test_what_is_no_prompt(row: dict[str, Any], code: str | None) -> None:
    assert codes(renderer(), row) == [code]


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ([{"role": "user", "content": "hi"}], None),
        ('[{"role": "user", "content": "hi"}]', None),
        ([{"role": "user", "content": "hi", "name": None, "tool_calls": None}], None),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], None),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "unsupported_content"),
        ([{"role": "user", "content": 5}], "not_text"),
        ([], "empty_prompt"),
        ("hi", "bad_messages"),
        ([{"content": "hi"}], "bad_messages"),
        (["hi"], "bad_messages"),
        ({"role": "user"}, "bad_messages"),
        (None, "null_prompt"),
    ],
)
def test_messages_in_the_forms_that_data_have(demo: Model, value: Any, code: str | None) -> None:
    r = renderer(demo, messages="m")
    assert codes(r, {"m": value}) == [code]
    if code is None:
        assert texts(r, {"m": value}) == texts(r, {"m": [{"role": "user", "content": "hi"}]})


@pytest.mark.parametrize("fault", ["1 / 0", "'{} {}'.format(1)", "range(10 ** 9)", "'x' * 10 ** 30"])
def test_a_chat_template_that_fails_on_a_row_fails_that_row_alone(demo: Model, fault: str) -> None:
    template = f"{{{{ messages[0].content }}}}{{% if messages[0].content == 'bad' %}}{{{{ {fault} }}}}{{% endif %}}"
    r = renderer(demo, chat_template=template)
    assert codes(r, {"p": "good"}, {"p": "bad"}, {"p": "good"}) == [None, "chat_template_error", None]


def test_a_chat_templates_own_refusal_is_in_the_message(demo: Model) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    assert "roles must alternate" in texts(renderer(demo, chat_template=template), {"p": "x"})[0]


def test_half_a_surrogate_pair_fails_its_row_alone(demo: Model) -> None:
    fine, half = [f'[{{"role": "user", "content": "{c}"}}]' for c in ("fine", "a\\ud800")]
    for model in (STUB, demo):
        assert codes(renderer(model, messages="m"), {"m": fine}, {"m": half}, {"m": fine}) == [
            None,
            "bad_unicode",
            None,
        ]
        for chat in (True, False):
            assert codes(renderer(model, chat=chat), {"p": "x"}, {"p": "\udfff"}) == [None, "bad_unicode"]
    assert "\\ud800" in texts(renderer(messages="m"), {"m": half})[0]


def test_json_text_nested_without_end_fails_its_row() -> None:
    assert codes(renderer(messages="m"), {"m": "[" * 100_000}) == ["bad_messages"]


def test_chat_tokens_are_those_of_the_models_own_template(demo: Model) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo.path)
    messages = [{"role": "system", "content": "Be kind.\n"}, {"role": "user", "content": "héllo <b> 🌊"}]
    wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    [prompt] = render(renderer(demo, messages="m"), {"m": messages})
    assert isinstance(prompt, Prompt)
    assert list(prompt.tokens) == wanted
    assert wanted[0] == tokenizer.bos_token_id != wanted[1]
    [same] = render(renderer(demo, system="Be kind.\n"), {"p": "héllo <b> 🌊"})
    assert isinstance(same, Prompt)
    assert list(same.tokens) == wanted


def test_plain_text_that_begins_with_bos_does_not_get_two(demo: Model) -> None:
    tokens = render(renderer(demo, chat=False), {"p": "<|im_start|><|im_start|>x"}, {"p": "x"})
    assert isinstance(tokens[0], Prompt)
    assert isinstance(tokens[1], Prompt)
    assert list(tokens[0].tokens).count(1) == 1


def test_a_template_sees_the_columns_and_the_row() -> None:
    r = renderer(template="{{ items }}/{{ self }}/{{ row['a b'] }}/{{ row.keys }}/{{ n + 1 }}")
    assert texts(r, {"items": "i", "self": "s", "a b": "ab", "keys": "k", "n": 1}) == ["i/s/ab/k/2"]
    assert r.columns is None


def test_a_templates_text_is_kept_to_the_last_line_break() -> None:
    assert texts(renderer(template="{{ a }} &amp; <x>\n"), {"a": "<b>"}) == ["<b> &amp; <x>\n"]


def test_text_in_data_that_looks_like_a_template_stays_text() -> None:
    assert texts(renderer(template="{{ a }}"), {"a": "{{ 7 * 7 }}{% raw %}"}) == ["{{ 7 * 7 }}{% raw %}"]


@pytest.mark.parametrize(
    ("template", "row", "says"),
    [
        ("{{ a }}", {}, "missing_column: input.template needs a"),
        ("{{ a }}", {"a": None}, "missing_column: input.template needs a"),
        ("{{ a.b }}", {"a": {"b": None}}, "template_error: input.template: a value is null"),
        ("{{ a.b }}", {"a": {}}, "template_error"),
        ("{{ a / 0 }}", {"a": 1}, "template_error: input.template: ZeroDivisionError"),
        ("{{ a.__class__.__mro__ }}", {"a": "x"}, "template_error"),
        ("{{ row.update({}) }}", {"a": "x"}, "template_error"),
        ("  ", {}, "empty_prompt"),
    ],
)
def test_a_template_that_fails_on_a_row_fails_that_row(template: str, row: dict[str, Any], says: str) -> None:
    assert texts(renderer(template=template), row)[0].startswith(says)


def test_a_default_provides_for_missing_and_null() -> None:
    r = renderer(template="{{ lang | default('en') }} {% if x is defined %}{{ x }}{% endif %}{{ t }}")
    assert texts(r, {"t": "a"}, {"t": "b", "lang": None}, {"t": "c", "lang": "fr", "x": 1}) == ["en a", "en b", "fr 1c"]
    assert r.required == {"t"}
    assert r.columns == frozenset({"lang", "x", "t"})


@pytest.mark.parametrize("broken", ["{% if %}", "{{ a | nosuch }}", "{{ a is nosuch }}"])
def test_a_broken_template_is_a_spec_error_with_its_line(broken: str) -> None:
    with pytest.raises(SpecError, match=r"input.template: line 2 is not valid Jinja2"):
        renderer(template=f"{{{{ a }}}}\n{broken}")


@pytest.mark.parametrize("broken", ["{% if %}", "{{ messages | nosuch }}"])
def test_a_broken_chat_template_is_a_spec_error_with_its_line(demo: Model, broken: str) -> None:
    with pytest.raises(SpecError, match=r"input.chat_template: line 2 is not valid Jinja2"):
        renderer(demo, chat_template=f"x\n{broken}")


@pytest.mark.parametrize("name", ["range", "dict", "cycler", "joiner", "namespace", "lipsum"])
def test_a_column_may_be_named_like_a_function_of_jinja(name: str) -> None:
    r = renderer(template=f"{{{{ {name} }}}}")
    assert r.columns == r.required == frozenset({name})
    assert texts(r, {name: "text"}) == ["text"]
    assert codes(r, {}, {name: None}) == ["missing_column"] * 2
    assert texts(renderer(template=f"{{{{ {name} | default('none') }}}}"), {}) == ["none"]


def test_a_function_of_jinja_stays_one_beside_a_column_of_its_name() -> None:
    r = renderer(template="{% for i in range(n) %}{{ i }}{% endfor %}")
    assert r.columns == frozenset({"n"})
    assert texts(r, {"n": 3, "range": "a column"}) == ["012"]
    assert texts(renderer(template="{% set range = 5 %}{{ range }}{{ a }}"), {"a": "x"}) == ["5x"]
    assert texts(renderer(template="{% for dict in a %}{{ dict }}{% endfor %}"), {"a": ["x", "y"]}) == ["xy"]


def test_the_context_limit_is_exact() -> None:
    r = renderer(max_model_len=10)
    fits, capped, full = render(r, {"p": "x" * 3}, {"p": "x" * 27}, {"p": "x" * 30})
    assert isinstance(fits, Prompt)
    assert fits.max_tokens == 9
    assert isinstance(capped, Prompt)
    assert (len(capped.tokens), capped.max_tokens) == (9, 1)
    assert isinstance(full, RefusedRow)
    assert (full.code, full.prompt_tokens) == ("prompt_too_long", 10)


@pytest.mark.parametrize("too_long", ["fail", "truncate_left", "truncate_right"])
@pytest.mark.parametrize("source", [{}, {"template": "{{ p }}"}])
def test_a_text_far_too_long_is_not_encoded_as_a_whole(too_long: str, source: dict[str, Any]) -> None:
    encoded: list[int] = []

    class Counting(StubTokenizer):
        def encode(self, texts: list[str], special: bool) -> list[Sequence[int]]:
            encoded.extend(map(len, texts))
            return super().encode(texts, special)

        def spans(self, texts: list[str]) -> list[list[tuple[int, int]]]:
            encoded.extend(map(len, texts))
            return super().spans(texts)

    text = "".join(f"{i:07d}," for i in range(1_000_000))
    r = renderer(Model("stub", "stub-1", None, Counting), too_long=too_long, **source)
    one, long, two = render(r, {"p": "one"}, {"p": text}, {"p": "two"})
    assert max(encoded) < 1 << 21
    assert [r.text(x.tokens) for x in (one, two) if isinstance(x, Prompt)] == ["one", "two"]
    if too_long == "fail":
        assert isinstance(long, RefusedRow)
        assert (long.code, long.prompt_tokens) == ("prompt_too_long", None)
        assert "more than" in long.message
        assert "the context 1000" in long.message
    else:
        assert isinstance(long, Prompt)
        assert long.warnings == ("prompt_truncated",)
        kept = r.text(long.tokens)
        assert len(long.tokens) == 1000 - 16
        assert len(kept) > 3 * (1000 - 16) - 3
        assert text.endswith(kept) if too_long == "truncate_left" else text.startswith(kept)


def children() -> list[int]:
    """Processes of this one that are alive."""
    tasks = Path("/proc/self/task").glob("*/children")
    alive = []
    for pid in (int(pid) for task in tasks for pid in task.read_text().split()):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        alive += [pid] if state != "Z" else []
    return alive


def wait_until(true: Callable[[], Any]) -> None:
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# A computation that nothing but the end of its process can stop.
UNSTOPPABLE = "{% set a, b = [0] * 90000, [0] * 90000 %}{{ [a] * 90000 == [b] * 90000 }}"


def on(row: str, code: str) -> str:
    return f"{{% if p == '{row}' %}}{code}{{% endif %}}{{{{ p }}}}"


@pytest.mark.parametrize("kills", [{0}, {1}, {0, 1, 2}, {5}])
def test_a_template_process_that_is_killed_loses_and_swaps_no_row(kills: set[int]) -> None:
    before = set(children())
    r = renderer(template="{{ p }}")
    looked = 0

    def kill() -> None:
        nonlocal looked
        if looked in kills:
            for pid in set(children()) - before:
                os.kill(pid, signal.SIGKILL)
        looked += 1

    # More than the eightfold of what a pipe holds, so that the answers come in that many pieces at least.
    rows = [{"p": f"row {i}{' word' * 160}"} for i in range(700)]
    out = r.render(RowBatch(0, "in.jsonl", range(1, 701), rows), kill)
    assert looked > max(kills)
    assert [r.text(x.tokens) for x in out if isinstance(x, Prompt)] == [row["p"] for row in rows]


@pytest.mark.parametrize(
    ("code", "limits", "says"),
    [
        (ENDLESS, Limits(seconds=0.2), "more than 0.2 s of processor time"),
        (UNSTOPPABLE, Limits(seconds=0.2), "more than 0.4 s of processor time"),
        ("{{ 'x' * 10 ** 9 }}", Limits(memory_bytes=200 << 20), "more than 200 MiB of memory"),
        ("{% set x = [0] * 10 ** 9 %}", Limits(memory_bytes=200 << 20), "more than 200 MiB of memory"),
        ("{{ 'x' * 1001 }}", Limits(characters=1000), "more than the 1,000 that it may have"),
    ],
)
def test_a_row_that_takes_too_much_fails_alone(code: str, limits: Limits, says: str) -> None:
    r = renderer(template=on("bad", code), limits=limits, max_model_len=1 << 20)
    rows = [{"p": f"row {i}"} for i in range(6)]
    rows = [*rows[:3], {"p": "bad"}, *rows[3:5], {"p": "bad"}, rows[5]]
    out = texts(r, *rows)
    assert [text for text in out if "template_limit" not in text] == [f"row {i}" for i in range(6)]
    assert [i for i, text in enumerate(out) if "template_limit" in text and says in text] == [3, 6]


def test_a_template_that_takes_too_much_on_every_row_is_to_blame() -> None:
    r = renderer(template=ENDLESS + "{{ p }}", limits=Limits(seconds=0.05, timeouts=4))
    with pytest.raises(SpecError, match=r"as on the 3 rows before it.*simplify input.template"):
        render(r, *[{"p": "x"}] * 20)
    mixed = renderer(template=on("bad", ENDLESS), limits=Limits(seconds=0.05, timeouts=4))
    rows = [{"p": "bad" if i % 4 else "good"} for i in range(12)]
    assert codes(mixed, *rows) == [None if row["p"] == "good" else "template_limit" for row in rows]


def test_a_stop_ends_a_template_that_runs() -> None:
    before = set(children())
    r = renderer(template=on("bad", ENDLESS), limits=Limits(seconds=100))
    looked = 0

    def stop() -> None:
        nonlocal looked
        looked += 1
        if looked == 3:
            raise Stopped("asked for")

    with pytest.raises(Stopped, match="asked for"):
        r.render(RowBatch(0, "in.jsonl", range(1, 3), [{"p": "bad"}, {"p": "y"}]), stop)
    assert set(children()) == before
    assert texts(r, {"p": "another"}) == ["another"]


def test_the_template_process_ends_with_its_renderer() -> None:
    before = set(children())
    r = renderer(template="{{ p }}")
    assert len(set(children()) - before) == 1
    del r
    assert set(children()) == before


def test_the_template_process_ends_with_a_driver_that_is_killed() -> None:
    code = (
        "from tests.test_prompt import ENDLESS, Limits, children, render, renderer\n"
        "r = renderer(template=ENDLESS + '{{ p }}', limits=Limits(seconds=1, timeouts=1000))\n"
        "print(*children(), flush=True)\n"
        "render(r, *[{'p': 'x'}] * 200)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pid = int(driver.stdout.readline())
        # It works on the first rows once it has used more time than compiling takes.
        wait_until(lambda: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11]) > 100)
        driver.kill()
    wait_until(lambda: not Path(f"/proc/{pid}").exists())


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def test_values_nested_deep_or_of_odd_types_fail_their_rows_at_most() -> None:
    r = renderer(template="{{ p is string }}")
    odd: list[Any] = [nested(499), lambda: 0, (i for i in "generator"), nested(700)]
    out = texts(r, *({"p": value} for value in ["fine", *odd, "fine too"]))
    assert [out[0], out[1], out[-2], out[-1]] == ["True", "False", "False", "True"]
    assert all(text.startswith("template_error: a value of the row cannot be given") for text in out[2:4])


@pytest.mark.parametrize("template", ["{{ " + "not " * 1000 + "p }}", "{{ " + "(" * 300 + "p" + ")" * 300 + " }}"])
def test_a_template_nested_too_deep_is_a_spec_error(template: str) -> None:
    with pytest.raises(SpecError, match=r"input\.template"):
        renderer(template=template)


def test_nothing_is_computed_while_a_template_is_compiled() -> None:
    r = renderer(template=on("bad", "{{ 10 ** 5000 }}{{ 'x' * 10 ** 9 }}") + on("worse", UNSTOPPABLE))
    assert texts(r, {"p": "good"}) == ["goodgood"]
    with pytest.raises(SpecError, match=r"input\.template"):
        renderer(template="{{ p }}{{ " + "9" * 5000 + " }}")


def test_an_empty_chat_template_is_a_spec_error(demo: Model) -> None:
    with pytest.raises(SpecError, match=r"input\.chat_template: the file is empty"):
        renderer(demo, chat_template=" \n")


def test_sampling_from_columns() -> None:
    r = renderer(columns={"max_tokens": "n", "temperature": "t", "stop": "s"})
    out = render(
        r,
        {"p": "x", "n": 4, "t": 0.5, "s": ["a"]},
        {"p": "x", "n": 4.0, "t": 1},
        {"p": "x", "n": None},
        {"p": "x"},
        {"p": "x", "n": 0},
        {"p": "x", "t": "hot"},
        {"p": "x", "n": True},
    )
    kept = [(x.max_tokens, x.overrides) for x in out if isinstance(x, Prompt)]
    assert kept[0] == (4, '{"stop":["a"],"temperature":0.5}')
    assert [k[0] for k in kept] == [4, 4, 16, 16]
    assert codes(r, {"p": "x", "n": 0}, {"p": "x", "t": "hot"}, {"p": "x", "n": True}) == ["bad_sampling"] * 3


def key(r: Renderer, row: dict[str, Any], place: int = 0, file: str = "in.jsonl") -> bytes:
    return render(r, row, first=place, file=file)[0].key


def test_what_a_key_depends_on() -> None:
    row = {"id": 1, "p": "x", "other": "y"}
    base = renderer(id="id")
    assert len(key(base, row)) == 16
    same = [
        key(base, row, place=5),
        key(base, row, file="elsewhere.jsonl"),
        key(base, {**row, "other": "z"}),
        key(renderer(id="id", max_model_len=500), row),
        key(renderer(id="id", template="{{ p }}"), row),
    ]
    assert set(same) == {key(base, row)}
    other = [
        key(base, {**row, "p": "y"}),
        key(base, {**row, "id": 2}),
        key(base, {**row, "id": "1"}),
        key(base, {**row, "id": 1.0}),
        key(renderer(id="id", constants={"temperature": 1}), row),
        key(renderer(id="id", constants={"max_tokens": 17}), row),
        key(renderer(id="id", constants={"seed": 1}), row),
        key(renderer(), row),
        key(renderer(), row, place=1),
        key(renderer(), row, file="b"),
        key(renderer(Model("stub", "other", 1000, STUB.tokenizer), id="id"), row),
    ]
    assert len({*other, key(base, row)}) == len(other) + 1


@pytest.mark.parametrize("text", ["", "a", "ab", "abc", "abcd", "é" * 5, "🌊\n", "x" * 1000])
def test_the_stub_tokenizer_is_reversible(text: str) -> None:
    tokenizer = STUB.tokenizer()
    [tokens] = tokenizer.encode([text], special=False)
    assert len(tokens) == -(-len(text.encode()) // 3)
    assert tokenizer.decode(tokens) == text


def loaded_after(code: str) -> Sequence[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_rendering_does_not_import_torch(demo: Model) -> None:
    code = (
        "from pathlib import Path\nfrom bulkgen.prompt import open_model\n"
        f"open_model('x', None, Path({demo.path!r})).tokenizer().encode(['hello'], False)"
    )
    assert "torch" not in loaded_after(code)
    assert "transformers" not in loaded_after("import bulkgen.prompt\nbulkgen.prompt.open_model('stub', None, None)")


def test_a_model_is_the_same_wherever_it_lies(demo: Model, tmp_path: Any) -> None:
    import shutil

    copy = tmp_path / "elsewhere"
    shutil.copytree(demo.path, copy)
    assert open_model("copy", None, copy).fingerprint == demo.fingerprint
    assert demo.context_length == 8192
    (copy / "config.json").write_text('{"max_position_embeddings": 5}')
    assert open_model("copy", None, copy).fingerprint != demo.fingerprint


def write_model(folder: Path, config: str = '{"max_position_embeddings": 64}', **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


LONG_ROPE = (
    '{"max_position_embeddings": 131072, "original_max_position_embeddings": 4096,'
    ' "rope_parameters": {"rope_type": "longrope", "factor": 32.0}}'
)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ('{"n_positions": 7}', 7),
        ('{"text_config": {"max_position_embeddings": 7}}', 7),
        ('{"text_config": [1]}', None),
        ('{"max_position_embeddings": true}', None),
        (LONG_ROPE, 4096),
        (LONG_ROPE.replace("longrope", "yarn"), 131072),
        ("[]", None),
    ],
)
def test_the_context_length_that_a_config_names(tmp_path: Path, config: str, length: int | None) -> None:
    assert open_model("m", None, write_model(tmp_path / "m", config)).context_length == length


@pytest.mark.parametrize("files", [1, 5])
def test_another_checkpoint_of_a_model_is_another_model(tmp_path: Path, files: int) -> None:
    """It has the same files, of the same names and sizes."""
    folder, seen = write_model(tmp_path / "m"), set()
    for layer in (None, 0, 7, 19):
        for file in range(files):
            weights = bytearray(2_000_000)
            if layer is not None and file == files // 2:
                weights[layer * 100_000 : (layer + 1) * 100_000] = b"\1" * 100_000
            (folder / f"model-{file}.safetensors").write_bytes(weights)
        seen.add(open_model("m", None, folder).fingerprint)
    assert len(seen) == 4


def test_weights_that_cannot_be_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").symlink_to("gone")
    with pytest.raises(SpecError, match="cannot be read"):
        open_model("m", None, folder)


FILES = ["vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", "spiece.model", "generation_config.json"]


@pytest.mark.parametrize("file", FILES)
def test_each_file_that_shapes_tokens_or_ends_answers_is_in_the_fingerprint(tmp_path: Path, file: str) -> None:
    folder = write_model(tmp_path / "m")
    seen = {open_model("m", None, folder).fingerprint}
    for text in ("a", "b"):
        (folder / file).write_text(text)
        seen.add(open_model("m", None, folder).fingerprint)
    assert len(seen) == 3


def test_a_folder_without_a_tokenizer_is_a_spec_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"tokenizer cannot be loaded.*must bring a tokenizer.json"):
        open_model("m", None, write_model(tmp_path / "m")).tokenizer()


def test_a_models_own_code_is_neither_run_nor_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    ran = tmp_path / "ran"
    own = '{"auto_map": {"AutoTokenizer": ["own.Own", null]}, "tokenizer_class": "Own"}'
    folder = write_model(tmp_path / "m", tokenizer_config__json=own, own__py=f"open({str(ran)!r}, 'w')")
    with pytest.raises(SpecError, match="tokenizer cannot be loaded"):
        open_model("m", None, folder).tokenizer()
    assert not ran.exists()


@pytest.mark.parametrize("special_tokens", ["warn", "text"])
def test_how_a_training_cut_and_padded_its_texts_is_nothing_to_a_prompt(
    demo: Model, tmp_path: Path, special_tokens: str
) -> None:
    from tokenizers import Tokenizer

    folder = tmp_path / "model"
    shutil.copytree(demo.path, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(folder / "tokenizer.json"))
    rows = [{"p": "one two three " * 20}, {"p": "one"}]
    trained, plain = (
        [x.tokens for x in render(renderer(model, special_tokens=special_tokens), *rows) if isinstance(x, Prompt)]
        for model in (open_model("x", None, folder), demo)
    )
    assert [list(tokens) for tokens in trained] == [list(tokens) for tokens in plain]
