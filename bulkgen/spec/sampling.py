"""Sampling parameters under vLLM's names, each a value or a column, with the ranges that vLLM accepts.

The ranges are those of `vllm.SamplingParams`; they stand here so that a wrong value is found before an engine loads.
"""

from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from bulkgen.errors import RowError


class Column(BaseModel):
    """A value that each row brings along, in the named column. A null there means the parameter's default."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Column")

    column: Annotated[str, Field(min_length=1)]


Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, description="-1 or 0: all tokens")]
MinP = Annotated[float, Field(ge=0, le=1)]
MaxTokens = Annotated[int, Field(ge=1)]
MinTokens = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Stop = Annotated[str, Field(min_length=1)] | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SamplingSpec(BaseModel):
    """How to sample. What is not set is left to vLLM, except `max_tokens`, whose default there (16) cuts answers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, title="Sampling")

    temperature: Temperature | Column = Field(1.0, description="0 is greedy")
    top_p: TopP | Column | None = None
    top_k: TopK | Column | None = None
    min_p: MinP | Column | None = None
    max_tokens: MaxTokens | Column = Field(512, description="output tokens at most; capped to the room in the context")
    min_tokens: MinTokens | Column | None = None
    seed: Seed | Column | None = None
    stop: Stop | Column | None = None
    presence_penalty: Penalty | Column | None = None
    frequency_penalty: Penalty | Column | None = None
    repetition_penalty: RepetitionPenalty | Column | None = None

    def constants(self) -> dict[str, Any]:
        """The parameters that are the same for every row, and the defaults of those that may be null in a row."""
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        values = {n: defaults[n] if isinstance(v, Column) else v for n, v in self}
        return {name: value for name, value in values.items() if value is not None}

    def columns(self) -> dict[str, str]:
        """Parameter → column, for those that come from the rows."""
        return {name: value.column for name, value in self if isinstance(value, Column)}


_ROW_VALUES: dict[str, Any] = {
    "temperature": Temperature,
    "top_p": TopP,
    "top_k": TopK,
    "min_p": MinP,
    "max_tokens": MaxTokens,
    "min_tokens": MinTokens,
    "seed": Seed,
    "stop": Stop,
    "presence_penalty": Penalty,
    "frequency_penalty": Penalty,
    "repetition_penalty": RepetitionPenalty,
}


@cache
def _adapter(param: str) -> TypeAdapter[Any]:
    return TypeAdapter(_ROW_VALUES[param], config=ConfigDict(strict=True))


def check_sampling_value(param: str, value: Any) -> Any:
    """A row's value of a sampling parameter, if it is one. Raises RowError (`bad_sampling`) that says why not.

    Whole numbers that arrive as floats (a Parquet column with nulls, read by pandas) count as integers.
    """
    if isinstance(value, float) and value.is_integer() and param in ("top_k", "max_tokens", "min_tokens", "seed"):
        value = int(value)
    try:
        return _adapter(param).validate_python(value)
    except ValidationError as e:
        reason = e.errors()[0]["msg"]
        raise RowError("bad_sampling", f"sampling.{param}: {str(value)[:80]!r} from its column: {reason}") from None
