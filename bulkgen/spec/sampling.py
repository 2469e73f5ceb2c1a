"""Sampling parameters under vLLM's names, each a value or a column, with the ranges that vLLM accepts.

The ranges are those of `vllm.SamplingParams`; they stand here so that a wrong value is found before an engine loads.
"""

from collections.abc import Mapping
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from bulkgen.errors import RowError
from bulkgen.spec.faults import shown, wanted_value
from bulkgen.spec.section import Misfit, Section
from bulkgen.spec.structured import StructuredSpec, check_structured


class Column(Section):
    """A value that each row brings along, in the named column; `default` stands for a null there."""

    column: Annotated[str, Field(min_length=1)]
    default: Any = Field(default=None, description="value of a row whose column holds none; unset: the parameter's own")

    @model_validator(mode="before")
    @classmethod
    def _by_its_form(cls, value: Any) -> Any:
        if not isinstance(value, dict | Column):
            raise PydanticCustomError("column_type", "{form}", {"form": "{column: NAME}"})
        return value

    @model_serializer
    def _plain(self) -> dict[str, Any]:
        return {name: value for name, value in self if value is not None}


# Tokens are counted in 32 bits, here and in vLLM; its seeds have 64.
_MOST_TOKENS = 2**31 - 1
# vLLM's own bounds, unless its environment or engine settings say otherwise.
_MOST_SAMPLES = 16384
_MOST_LOGPROBS = 20

STRUCTURED = "structured_outputs"

Temperature = Annotated[float, Field(ge=0, le=2)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, le=_MOST_TOKENS)]
MinP = Annotated[float, Field(ge=0, le=1)]
MaxTokens = Annotated[int, Field(ge=1, le=_MOST_TOKENS)]
MinTokens = Annotated[int, Field(ge=0, le=_MOST_TOKENS)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
StopText = Annotated[str, Field(min_length=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(gt=0)]
Samples = Annotated[int, Field(ge=1, le=_MOST_SAMPLES)]
LikeliestTokens = Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)]


class SamplingSpec(Section):
    """How to sample. What is not set is left to vLLM, except `max_tokens`, whose default there (16) cuts answers."""

    temperature: Temperature | Column = Field(default=1.0, description="0 is greedy")
    top_p: TopP | Column | None = None
    top_k: TopK | Column | None = Field(default=None, description="-1 or 0: all tokens")
    min_p: MinP | Column | None = None
    max_tokens: MaxTokens | Column = Field(
        default=512, description="output tokens at most; capped to the room that the prompt leaves in the context"
    )
    min_tokens: MinTokens | Column | None = None
    seed: Seed | Column | None = None
    stop: StopText | list[StopText] | Column | None = Field(
        default=None, description="text or texts that end the output"
    )
    presence_penalty: Penalty | Column | None = None
    frequency_penalty: Penalty | Column | None = None
    repetition_penalty: RepetitionPenalty | Column | None = None
    n: Samples | Column | None = Field(default=None, description="answers to each row, in the column `samples`")
    logprobs: LikeliestTokens | Column | None = Field(
        default=None,
        description="log probability of each token, and of so many of the likeliest ones at its place",
    )
    ignore_eos: bool | Column | None = Field(default=None, description="go on after the model's end-of-text token")
    structured_outputs: StructuredSpec | None = Field(default=None, description="the form that answers must have")

    @model_validator(mode="after")
    def _min_below_max(self) -> "SamplingSpec":
        least, most = self.min_tokens, self.max_tokens
        if isinstance(least, int) and isinstance(most, int) and least > most:
            raise Misfit(
                f"{least} is more than max_tokens, which is {most}; lower it or raise max_tokens", "min_tokens"
            )
        return self

    @model_validator(mode="after")
    def _samples_differ(self) -> "SamplingSpec":
        if (fault := _equal_samples(self.n, self.temperature)) is not None:
            raise Misfit(fault, "n")
        return self

    @model_validator(mode="after")
    def _defaults_of_columns(self) -> "SamplingSpec":
        for name, value in self:
            if isinstance(value, Column) and value.default is not None:
                try:
                    _row_value(name, value.default)
                except ValidationError as e:
                    raise Misfit(f"must be {wanted_value(e)}, not {shown(value.default)}", name, "default") from None
        return self

    def constants(self) -> dict[str, Any]:
        """The parameters that are the same for every row, and the defaults of those that may be null in a row."""
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        values = {name: _default(name, value, defaults[name]) if _column(value) else value for name, value in self}
        values[STRUCTURED] = values[STRUCTURED].constraint() if values[STRUCTURED] is not None else None
        return {name: value for name, value in values.items() if value is not None}

    def columns(self) -> dict[str, str]:
        """Parameter → column, for those that come from the rows."""
        columns = {name: _column(value) for name, value in self}
        return {name: column for name, column in columns.items() if column is not None}

    def extra_columns(self) -> tuple[str, ...]:
        """Those of records.EXTRA_COLUMNS that these parameters can fill."""
        filled = (("samples", self.n), ("logprobs", self.logprobs), ("valid", self.structured_outputs))
        return tuple(name for name, value in filled if value is not None)


def _column(value: Any) -> str | None:
    return value.column if isinstance(value, Column | StructuredSpec) else None


def _default(param: str, value: Any, otherwise: Any) -> Any:
    """What a column's null means: what the spec says beside the column, else the parameter's own default."""
    default = getattr(value, "default", None)
    return otherwise if default is None else _row_value(param, default)


def _equal_samples(n: Any, temperature: Any) -> str | None:
    """What is wrong with asking for several answers that are bound to be the same."""
    if isinstance(n, int) and n > 1 and not isinstance(temperature, Column) and temperature == 0:
        return f"{n} answers at temperature 0 would be {n} times the same; raise temperature, or ask for one"
    return None


def check_sampling_together(sampling: Mapping[str, Any]) -> None:
    """Raise RowError (`bad_sampling`) where values that are right one by one do not go together in a row."""
    if (fault := _equal_samples(sampling.get("n"), sampling.get("temperature"))) is not None:
        raise RowError("bad_sampling", f"sampling.n: {fault}")


def check_sampling_value(param: str, value: Any, name: str | None = None, holder: str = "the row's column") -> Any:
    """A row's value of a sampling parameter, if it is one.

    Whole numbers that arrive as floats (a Parquet column with nulls, written by pandas) count as integers. `name`, if
    it is not the parameter's, and `holder` are for messages. Raises RowError that says why not: `bad_sampling`, or
    `bad_schema` for the form of answers.
    """
    name = name or f"sampling.{param}"
    if param == STRUCTURED:
        return check_structured(value, name)
    try:
        return _row_value(param, value)
    except ValidationError as e:
        message = f"{name} must be {wanted_value(e)}; {holder} has {shown(value)}"
        raise RowError("bad_sampling", message) from None


def _row_value(param: str, value: Any) -> Any:
    adapter = _row_values(param)
    try:
        return adapter.validate_python(value)
    except ValidationError:
        if isinstance(value, float) and value.is_integer():
            return adapter.validate_python(int(value))
        raise


@cache
def _row_values(param: str) -> TypeAdapter[Any]:
    """What SamplingSpec takes for a parameter, less the forms that only a spec can have."""
    kinds = [k for k in get_args(SamplingSpec.model_fields[param].annotation) if k not in (Column, type(None))]
    return TypeAdapter(reduce(or_, kinds), config=ConfigDict(strict=True, allow_inf_nan=False))
