"""Prompts: what is sent for a row, why a row cannot be sent, and what makes it the same row again."""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from bulkgen.engine.demo_model import prepare_demo_model
from bulkgen.errors import SpecError
from bulkgen.prompt import Model, PromptSource, Renderer, open_model
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
    **source: Any,
) -> Renderer:
    return Renderer(
        model,
        PromptSource(**source) if source.keys() & {"messages", "template"} else PromptSource(prompt="p", **source),
        constants={"temperature": 0, "max_tokens": 16, **(constants or {})},
        columns=columns or {},
        check=check_sampling_value,
        max_model_len=max_model_len,
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


def test_a_broken_template_is_a_spec_error_with_its_line() -> None:
    with pytest.raises(SpecError, match=r"input.template: line 2 is not valid Jinja2"):
        renderer(template="{{ a }}\n{% if %}")


def test_the_context_limit_is_exact() -> None:
    r = renderer(max_model_len=10)
    fits, capped, full = render(r, {"p": "x" * 3}, {"p": "x" * 27}, {"p": "x" * 30})
    assert isinstance(fits, Prompt)
    assert fits.max_tokens == 9
    assert isinstance(capped, Prompt)
    assert (len(capped.tokens), capped.max_tokens) == (9, 1)
    assert isinstance(full, RefusedRow)
    assert (full.code, full.prompt_tokens) == ("prompt_too_long", 10)


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
