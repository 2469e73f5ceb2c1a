"""The job spec's nouns and what is true of each alone. Reading YAML and naming lines is loading.py's part."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from bulkgen.errors import SpecError
from bulkgen.records import RESULT_COLUMNS
from bulkgen.spec.sampling import SamplingSpec

STATUS_COLUMN = "status"

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]


class _Noun(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class InputSpec(_Noun):
    """The rows, and how one becomes a prompt: exactly one of messages, prompt and template."""

    path: Text | Annotated[list[Text], Field(min_length=1)] = Field(
        description="file, folder, glob, or a list of these"
    )
    id: Text | None = Field(None, description="column that names a row; without it, file and position do")
    messages: Text | None = Field(None, description="column of chat messages")
    prompt: Text | None = Field(None, description="column of text, sent as one user message")
    template: Text | None = Field(
        None, description="Jinja2 template of the user message, the row's columns its variables"
    )
    system: Text | None = Field(None, description="Jinja2 template of a system message, with prompt or template")
    chat: bool = Field(True, description="false: send the text as it is, without the model's chat template")
    chat_template: Text | None = Field(None, description="file with a chat template, in place of the model's own")
    allow_empty: bool = Field(False, description="an input without rows is in order and gives an output without rows")

    @model_validator(mode="after")
    def _one_prompt(self) -> "InputSpec":
        given = [name for name in ("messages", "prompt", "template") if getattr(self, name) is not None]
        if len(given) != 1:
            what = f"there are {' and '.join(given)}" if given else "there is none"
            raise ValueError(f"needs exactly one of messages, prompt and template; {what}")
        if self.system is not None and self.messages is not None:
            raise ValueError("system goes with prompt or template; messages bring their own system message")
        if not self.chat and (self.messages or self.system or self.chat_template):
            raise ValueError("chat: false sends plain text; messages, system and chat_template need chat: true")
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        """All of `path`."""
        return (self.path,) if isinstance(self.path, str) else tuple(self.path)


class OutputSpec(_Noun):
    """Where results go, and how often they are made durable."""

    path: Text = Field(description="a file ending in .parquet, or a folder")
    column: Text = Field("text", description="column of the generated text")
    commit_rows: Count = Field(5000, description="finished rows a replica holds at most before they are committed")
    commit_s: Annotated[float, Field(gt=0)] = Field(15.0, description="seconds a finished row waits at most for that")
    file_rows: Count = Field(1_000_000, description="rows a file, where the output is a folder")

    @field_validator("column")
    @classmethod
    def _own_name(cls, column: str) -> str:
        if column in (STATUS_COLUMN, *RESULT_COLUMNS):
            raise ValueError(f"{column!r} is a column that bulkgen writes itself; choose another name")
        return column

    @field_validator("path")
    @classmethod
    def _file_or_folder(cls, path: str) -> str:
        suffix = Path(path).suffix
        if suffix not in ("", ".parquet") and not path.endswith("/"):
            raise ValueError(f"ends in {suffix!r}; give a file ending in .parquet, or a folder ending in /")
        return path


class StubSpec(_Noun):
    """What the stub engine does, good and bad; `die_at` and `hang_at` hold a count of finished rows an incarnation."""

    seed: int = 0
    start_s: Annotated[float, Field(ge=0)] = Field(0.0, description="seconds that loading takes")
    step_s: Annotated[float, Field(ge=0)] = Field(0.0, description="seconds a step, which gives each sequence a token")
    output_tokens: Count | None = Field(None, description="of every row; unset: drawn from seed and prompt")
    kv_tokens: Count = Field(1 << 20, description="size of the KV cache")
    fail_rate: Annotated[float, Field(ge=0, le=1)] = Field(0.0, description="share of rows that are refused")
    die_on_start: Annotated[int, Field(ge=0)] = Field(0, description="how many incarnations die while loading")
    die_at: list[Count] = Field([], description="the nth incarnation is killed after so many rows")
    hang_at: list[Count] = Field([], description="the nth incarnation falls silent after so many rows")
    shuffle: bool = Field(False, description="rows that end together come out in random order")


class EngineSpec(_Noun):
    """The engine and its settings, under vLLM's own names. What is unset is vLLM's default."""

    config: Text | None = Field(None, description="file with settings of this section; the job's own win")
    kind: Literal["vllm", "stub"] = "vllm"
    replicas: Count = Field(
        1, description="engine processes: one a GPU or tensor-parallel group; on CPU, cores are divided"
    )
    max_restarts: Annotated[int, Field(ge=0)] = Field(3, description="times a replica that died is started again")
    max_model_len: Count | None = Field(None, description="prompt and output tokens together; unset: the model's own")
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    block_size: Count | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    kv_cache_memory_bytes: Count | None = None
    kv_cache_dtype: Text | None = None
    dtype: Text | None = None
    quantization: Text | None = None
    enforce_eager: bool | None = None
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    tensor_parallel_size: Count | None = None
    seed: int | None = None
    args: dict[str, Any] = Field({}, description="any other of vLLM's EngineArgs")
    env: dict[str, str | int | float] = Field({}, description="environment of the engine's process (VLLM_…, OMP_…)")
    stub: StubSpec = StubSpec()

    @model_validator(mode="after")
    def _no_double(self) -> "EngineSpec":
        for name in self.args:
            if name in type(self).model_fields or name == "model":
                raise ValueError(f"args.{name} has a key of its own here; write it as engine.{name}")
        if self.kind != "stub" and self.stub != StubSpec():
            raise ValueError("stub settings need kind: stub")
        return self

    def vllm_args(self) -> dict[str, Any]:
        """What is set, as vLLM's EngineArgs."""
        ours = {"config", "kind", "replicas", "max_restarts", "args", "env", "stub"}
        named = {name: value for name, value in self if name not in ours and value is not None}
        return {**named, **self.args}

    def environment(self) -> dict[str, str]:
        """`env` as a process takes it."""
        return {name: str(value) for name, value in self.env.items()}


class ShardsSpec(_Noun):
    """How rows are cut into shards; `auto` follows from the data."""

    target_rows: Count | Literal["auto"] = "auto"
    buckets: Annotated[list[Count], Field(min_length=1)] | Literal["auto"] = Field(
        "auto", description="upper edges of the length ranges, in prompt tokens"
    )

    def rows(self) -> int | None:
        """Rows a shard, None for auto."""
        return None if self.target_rows == "auto" else self.target_rows

    def edges(self) -> list[int] | None:
        """Bucket edges, None for auto."""
        return None if self.buckets == "auto" else self.buckets


class PriceSpec(_Noun):
    """What the machine costs; without it reports have no money in them."""

    usd_per_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(None, description="of one replica")


class JobSpec(_Noun):
    """One job, as its YAML file and --set say it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, title="bulkgen job spec")

    name: Text
    model: Text = Field(description="hub id, folder, demo (a small model for trying out), or stub (no model)")
    revision: Text | None = Field(None, description="of a hub model: branch, tag or commit")
    input: InputSpec
    sampling: SamplingSpec = SamplingSpec()
    output: OutputSpec
    engine: EngineSpec = EngineSpec()
    shards: ShardsSpec = ShardsSpec()
    price: PriceSpec = PriceSpec()

    _source: Path = PrivateAttr(Path("job.yaml"))

    @model_validator(mode="after")
    def _stub_model(self) -> "JobSpec":
        if self.model == "stub" and self.engine.kind != "stub":
            raise ValueError("model stub has no weights; it needs engine.kind: stub")
        return self

    @property
    def source(self) -> Path:
        """The file that the spec was read from."""
        return self._source

    @property
    def base(self) -> Path:
        """The folder that relative paths start from."""
        return self._source.absolute().parent

    @property
    def output_path(self) -> Path:
        """The output as an absolute path."""
        return Path(os.path.normpath(self.base / self.output.path))

    def chat_template_text(self) -> str | None:
        """The chat template that the job brings along. Raises SpecError when its file cannot be read."""
        if self.input.chat_template is None:
            return None
        path = self.base / self.input.chat_template
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise SpecError(f"{self.source}: input.chat_template: {path}: {e}") from e

    def resolved(self) -> dict[str, Any]:
        """Everything, defaults included, as plain data."""
        return self.model_dump(mode="json")

    def identity_settings(self) -> dict[str, Any]:
        """What makes a row another row when it changes: model, prompt and sampling, and nothing else."""
        prompt = self.input.model_dump(mode="json", exclude={"path", "allow_empty", "chat_template"})
        return {
            "model": self.model,
            "revision": self.revision,
            "prompt": prompt | {"chat_template": self.chat_template_text()},
            "sampling": self.sampling.model_dump(mode="json"),
        }


def spec_json_schema() -> dict[str, Any]:
    """JSON Schema of the job spec."""
    return JobSpec.model_json_schema()


def check_collisions(spec: JobSpec, columns: Iterable[str]) -> None:
    """Raise SpecError where a column of the input has a name that bulkgen writes."""
    ours = {STATUS_COLUMN, *RESULT_COLUMNS, spec.output.column}
    for name in columns:
        if name == spec.output.column:
            raise SpecError(
                f"{spec.source}: output.column {name!r} is a column of the input already; choose another name for it"
            )
        if name in ours:
            raise SpecError(
                f"{spec.source}: the input has a column {name!r}, which bulkgen writes; rename it in the input"
            )
