"""What an answer is worth: all of it there, and in the form asked for."""

import json
import math
from typing import Any

import pytest

from bulkgen.engine.samples import together
from bulkgen.errors import RowError
from bulkgen.records import Completion, Failure, Sample
from bulkgen.results import judged
from bulkgen.spec import check_sampling_value

SCHEMA = {"json_schema": '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'}


def answer(text: str = "text", reason: str = "stop", **more: Any) -> Completion:
    return Completion(5, text, reason, 10, 2, 3, 0.1, 0.2, 0.3, 0.4, **more)


def answers(*texts: str, reason: str = "stop") -> Completion:
    samples = tuple(Sample(i, text, reason, 1) for i, text in enumerate(texts))
    return answer(texts[0] if texts else "", reason, samples=samples)


def test_an_answer_of_which_nothing_was_asked_is_as_it_came() -> None:
    given = answer("")
    assert judged(given, {"max_tokens": 5}) is given


@pytest.mark.parametrize(
    "given",
    [
        answers("a"),
        answers(),
        answers("a", "b", "c"),
        answer(samples=(Sample(1, "b", "stop", 1), Sample(0, "a", "stop", 1))),
        answer(samples=(Sample(0, "a", "stop", 1), Sample(0, "a", "stop", 1))),
    ],
)
def test_too_few_answers_or_others_are_no_result_and_worth_another_try(given: Completion) -> None:
    result = judged(given, {"n": 2})
    assert isinstance(result, Failure)
    assert (result.index, result.code, result.transient) == (5, "missing_samples", True)
    assert f"{len(given.samples)} of 2" in result.message


@pytest.mark.parametrize(
    ("text", "reason", "valid", "warnings"),
    [
        ('{"a":1}', "stop", True, ()),
        ('{"a":1}   \n\n', "length", True, ()),
        ('{"a": 1', "length", False, ("unfinished_output",)),
        ('{"a":' + " " * 2000, "length", False, ("unfinished_output",)),
        ('{"a":"1"}', "stop", False, ("invalid_output",)),
        ('{"a":NaN}', "stop", False, ("invalid_output",)),
        ("", "stop", False, ("invalid_output",)),
        ("[" * 100_000, "length", False, ("unfinished_output",)),
    ],
)
def test_what_has_not_the_form_says_so_and_is_kept(
    text: str, reason: str, valid: bool, warnings: tuple[str, ...]
) -> None:
    result = judged(answer(text, reason), {"structured_outputs": SCHEMA})
    assert isinstance(result, Completion)
    assert (result.text, result.valid, result.warnings) == (text, valid, warnings)


def test_one_answer_without_the_form_makes_the_row_say_so() -> None:
    result = judged(answers('{"a":1}', '{"a":', reason="length"), {"structured_outputs": SCHEMA, "n": 2})
    assert isinstance(result, Completion)
    assert [sample.valid for sample in result.samples] == [True, False]
    assert (result.valid, result.warnings) == (False, ("unfinished_output",))


# Each level asks twice for the next one.
DOUBLING = {
    "$ref": "#/$defs/0",
    "$defs": {str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"} if i < 40 else {}] * 2} for i in range(41)},
}


@pytest.mark.parametrize(
    ("form", "text", "valid"),
    [
        ({"choice": ["yes", "no"]}, "yes", True),
        ({"choice": ["yes", "no"]}, "yes ", False),
        ({"regex": "[a-z]+"}, "abc", True),
        ({"regex": "[a-z]+"}, "abc1", False),
        ({"regex": "(a+)+$"}, "a" * 60 + "!", None),  # nobody can wait for that
        ({"json_object": True}, "{}", True),
        ({"json_object": True}, "[]", False),
        ({"grammar": "root ::= 'x'"}, "y", None),
        ({"json_schema": '{"$ref":"http://127.0.0.1:9/other"}'}, "{}", None),  # nothing is fetched
        ({"json_schema": '{"$ref":"#"}'}, "{}", None),
        ({"json_schema": '{"type":"string","pattern":"("}'}, '"x"', None),
        ({"json_schema": '{"patternProperties":{"^(a+)+$":{}}}'}, f'{{"{"a" * 60}!":1}}', None),
        ({"json_schema": json.dumps(DOUBLING)}, "{}", None),
    ],
)
def test_forms(form: dict[str, Any], text: str, valid: bool | None) -> None:
    result = judged(answer(text), {"structured_outputs": form})
    assert isinstance(result, Completion)
    assert result.valid in ((None, False) if valid is None and "regex" in form else (valid,))


BAD_FORMS: dict[str, Any] = {
    "nothing": {},
    "two kinds": {"regex": "a", "choice": ["b"]},
    "another kind": {"x" * 10_000: 1},
    "no object": ["regex"],
    "no JSON": "{",
    "schema of a wrong type": {"json_schema": {"type": "objekt"}},
    "schema that is no JSON": {"json_schema": "{"},
    "schema that is a list": {"json_schema": "[]"},
    "schema that is true": {"json_schema": True},
    "schema with a wrong bound": {"json_schema": {"minLength": -1}},
    "schema with NaN": {"json_schema": {"minimum": math.nan}},
    "schema of a number": {"json_schema": {"$schema": 5}},
    "schema of a list": {"json_schema": {"$schema": ["a"]}},
    "schema with half a character": {"json_schema": {"const": "\ud800"}},
    "schema without end": {"json_schema": "[" * 100_000},
    "schema nested deep": {"json_schema": json.loads('{"not":' * 400 + "{}" + "}" * 400)},
    "open bracket": {"regex": "("},
    "regex with a NUL": {"regex": "a\0"},
    "no choice": {"choice": []},
    "choice of numbers": {"choice": [1]},
    "choice of half a character": {"choice": ["\ud800"]},
    "false": {"json_object": False},
    "a column": {"column": "c"},
}


@pytest.mark.parametrize("form", BAD_FORMS.values(), ids=BAD_FORMS.keys())
def test_forms_that_cannot_be_are_refused_before_an_engine_sees_them(form: Any) -> None:
    with pytest.raises(RowError) as caught:
        check_sampling_value("structured_outputs", form)
    assert caught.value.code == "bad_schema"
    assert len(caught.value.message) < 600


def test_the_order_of_a_schemas_properties_is_kept() -> None:
    form = check_sampling_value("structured_outputs", {"json_schema": {"properties": {"z": {}, "a": {}}}})
    assert form == {"json_schema": '{"properties":{"z":{},"a":{}}}'}


def test_nulls_that_arrow_puts_into_a_schema_are_left_out() -> None:
    padded = {"type": "object", "enum": None, "properties": {"a": {"type": "integer", "const": None}, "b": None}}
    form = check_sampling_value("structured_outputs", {"json_schema": padded, "regex": None})
    assert form == {"json_schema": '{"type":"object","properties":{"a":{"type":"integer"}}}'}
    written = {"json_schema": {"const": None, "properties": {"a": {"default": None, "enum": [None, 1]}}}}
    text = check_sampling_value("structured_outputs", written)["json_schema"]
    assert json.loads(text) == written["json_schema"]


def test_several_answers_are_put_together() -> None:
    first = Completion(5, "a", "stop", 10, 8, 3, 0.2, 0.3, None, 0.5)
    second = Completion(5, "", "length", 10, 0, 4, 0.1, 0.4, 0.1, 0.9)
    both = together([first, second])
    assert (both.text, both.finish_reason, both.prompt_tokens) == ("a", "stop", 10)
    assert (both.cached_tokens, both.output_tokens) == (0, 7)
    assert (both.queued_s, both.ttft_s, both.tpot_s, both.e2e_s) == (0.1, 0.3, 0.1, 0.9)
    assert [(s.index, s.text, s.finish_reason, s.output_tokens) for s in both.samples] == [
        (0, "a", "stop", 3),
        (1, "", "length", 4),
    ]
