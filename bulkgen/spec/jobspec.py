"""The job spec's sections and what is true of each. Reading YAML and naming lines is the part of loading.py."""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ByteSize, Field, JsonValue, PrivateAttr, field_validator, model_validator

from bulkgen.errors import SpecError
from bulkgen.records import EXTRA_COLUMNS, MOST_ATTEMPTS, RESULT_COLUMNS
from bulkgen.spec.code import code_setting, code_variable
from bulkgen.spec.sampling import SamplingSpec
from bulkgen.spec.section import Misfit, Section

# Beside the generated text, whose name the spec gives.
OWN_COLUMNS = frozenset(("status", *RESULT_COLUMNS))

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
PathText = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0)]


class InputSpec(Section):
    """The rows, and how one becomes a prompt: exactly one of messages, prompt and template."""

    path: Text | Annotated[list[Text], Field(min_length=1)] = Field(
        description="file, folder, glob, or a list of these"
    )
    id: Text | None = Field(default=None, description="column that names a row; without it, file and position do")
    messages: Text | None = Field(default=None, description="column of chat messages")
    prompt: Text | None = Field(default=None, description="column of text, sent as one user message")
    template: Text | None = Field(
        default=None, description="Jinja2 template of the user message, the row's columns its variables"
    )
    batch: bool = Field(default=False, description="true: the rows are lines of an OpenAI batch, with a body each")
    batch_model: Literal["check", "ignore"] = Field(
        default="check", description="what becomes of a body that names another model than the job's: it fails, or not"
    )
    system: Text | None = Field(
        default=None, description="Jinja2 template of a system message, with prompt or template"
    )
    chat: bool = Field(default=True, description="false: send the text as it is, without the model's chat template")
    chat_template: Text | None = Field(
        default=None, description="file with a chat template, in place of the model's own"
    )
    continue_final: bool = Field(
        default=False, description="true: an answer that is the last of a row's messages is continued, not refused"
    )
    special_tokens: Literal["warn", "fail", "text"] = Field(
        default="warn", description="what becomes of a row whose own text spells special tokens; text: they stay text"
    )
    too_long: Literal["fail", "truncate_left", "truncate_right"] = Field(
        default="fail", description="what becomes of a prompt that leaves no room for output in the context"
    )
    allow_empty: bool = Field(
        default=False, description="an input without rows is in order and gives an output without rows"
    )

    @model_validator(mode="after")
    def _one_prompt(self) -> "InputSpec":
        given = [name for name in ("messages", "prompt", "template") if getattr(self, name) is not None]
        given += ["batch"] if self.batch else []
        if len(given) != 1:
            what = f"there are {' and '.join(given)}" if given else "there is none"
            raise ValueError(f"needs exactly one of messages, prompt, template and batch; {what}")
        if self.system is not None and (self.messages is not None or self.batch):
            raise Misfit("goes with prompt or template; messages bring their own system message", "system")
        if self.batch and self.id is not None:
            raise Misfit("does not go with batch: true, where custom_id names a row; remove it", "id")
        if self.batch_model != "check" and not self.batch:
            raise Misfit("needs batch: true", "batch_model")
        if not self.chat:
            for name in ("messages", "system", "chat_template"):
                if getattr(self, name) is not None:
                    raise Misfit("needs chat: true; with chat: false the prompt is sent as plain text", name)
        if self.continue_final and self.messages is None and not self.batch:
            raise Misfit("goes with messages, whose last one may be an answer", "continue_final")
        return self

    @property
    def id_column(self) -> str | None:
        """The column that names a row."""
        return "custom_id" if self.batch else self.id

    @property
    def paths(self) -> tuple[str, ...]:
        """All of `path`."""
        return (self.path,) if isinstance(self.path, str) else tuple(self.path)


class OutputSpec(Section):
    """Where results go, and how often they are made durable."""

    path: Text = Field(description="a file ending in .parquet, or a folder")
    column: Text = Field(default="text", description="column of the generated text")
    commit_rows: Count = Field(
        default=5000, description="finished rows a replica holds at most before they are committed"
    )
    commit_s: Annotated[float, Field(gt=0)] = Field(
        default=15.0, description="seconds a finished row waits at most for that"
    )
    file_rows: Count = Field(default=1_000_000, description="rows a file, where the output is a folder")
    private: bool = Field(
        default=True, description="the run folder is for its owner alone; false: for whom the umask lets in"
    )

    @field_validator("column")
    @classmethod
    def _own_name(cls, column: str) -> str:
        if column in OWN_COLUMNS:
            raise ValueError(f"{column!r} is a column that bulkgen writes itself; choose another name")
        return column

    @field_validator("path")
    @classmethod
    def _file_or_folder(cls, path: str) -> str:
        if "\0" in path:
            raise ValueError(f"{path!r} holds a NUL character, which no path can; remove it")
        suffix = Path(path).suffix
        is_file, is_folder = suffix == ".parquet", suffix == "" or path.endswith("/")
        if is_file == is_folder or Path(path).name == ".parquet":
            what = f"{path!r} is neither a file ending in .parquet nor a folder"
            raise ValueError(f"{what}; give a file such as out.parquet, or a folder such as out/")
        return path


class StubSpec(Section):
    """What the stub engine does, good and bad; `die_at` and `hang_at` hold a count of finished rows an incarnation."""

    seed: int = 0
    start_s: Annotated[float, Field(ge=0)] = Field(default=0.0, description="seconds that loading takes")
    step_s: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="seconds a step, which gives each sequence a token"
    )
    output_tokens: Count | None = Field(default=None, description="of every row; unset: drawn from seed and prompt")
    kv_tokens: Count = Field(default=1 << 20, description="size of the KV cache")
    fail_rate: Share = Field(default=0.0, description="share of rows that are refused")
    die_on_start: Annotated[int, Field(ge=0)] = Field(default=0, description="how many incarnations die while loading")
    die_at: list[Count] = Field(default=[], description="the nth incarnation is killed after so many rows")
    hang_at: list[Count] = Field(default=[], description="the nth incarnation falls silent after so many rows")
    poison: list[Text] = Field(default=[], description="a prompt that holds one of these texts kills the process")
    stuck: list[Text] = Field(default=[], description="a prompt that holds one of these texts is never finished")
    flaky_rate: Share = Field(default=0.0, description="share of rows that fail once and succeed when tried again")
    double_rate: Share = Field(default=0.0, description="share of answers that the first incarnation gives twice")
    lose_rate: Share = Field(default=0.0, description="share of answers that the first incarnation never gives")
    swap_rate: Share = Field(default=0.0, description="share of its answers that are to a prompt of another length")
    shuffle: bool = Field(default=False, description="rows that end together come out in random order")
    answers: dict[Text, str] = Field(
        default={}, description="a prompt that holds one of these texts is answered with the text beside it"
    )
    cut: list[Text] = Field(default=[], description="a prompt that holds one of these texts is cut at max_tokens")
    short: list[Text] = Field(
        default=[], description="a prompt that holds one of these texts gets an answer less than it asks for"
    )
    neg_inf: list[Text] = Field(
        default=[], description="a prompt that holds one of these texts gets log probabilities of -inf"
    )
    echo_params: bool = Field(
        default=False, description="each prompt is answered with the sampling parameters of its request, as JSON"
    )


# No system takes these in a variable: a NUL, and half of a surrogate pair.
_NO_VARIABLE = re.compile("[\0\ud800-\udfff]")


# Of vLLM's settings those that say how and when an engine computes, never what. All others count as shaping answers:
# max_model_len, by which LongRoPE chooses its factors, and load_format, of which one makes weights up, among them.
_HOW_ALONE = frozenset(
    (
        "max_num_seqs",
        "max_num_batched_tokens",
        "block_size",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "enforce_eager",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "distributed_executor_backend",
        "seed",
        "num_gpu_blocks_override",
        "swap_space",
        "cpu_offload_gb",
        "compilation_config",
        "async_scheduling",
        "scheduling_policy",
        "disable_log_stats",
        "max_num_partial_prefills",
        "max_long_partial_prefills",
        "long_prefill_token_threshold",
        "download_dir",
        "hf_token",
    )
)


class EngineSpec(Section):
    """The engine and its settings, under vLLM's own names. What is unset is vLLM's default."""

    elsewhere = "vLLM's other settings go under engine.args"

    config: Text | None = Field(default=None, description="file with settings of this section; the job's own win")
    kind: Literal["vllm", "stub"] = "vllm"
    replicas: Count = Field(
        default=1, description="engine processes: one a GPU or tensor-parallel group; on CPU, cores are divided"
    )
    max_restarts: Annotated[int, Field(ge=0)] = Field(
        default=3, description="times in a row a replica is started again without having finished a row in between"
    )
    max_attempts: Count = Field(
        default=3,
        le=MOST_ATTEMPTS,
        description="times an engine may fail a row for a reason that need not lie in it, before the row has failed",
    )
    start_timeout_s: Seconds = Field(default=3600.0, description="seconds an engine may take to load")
    stall_s: Seconds = Field(
        default=600.0, description="seconds an engine may hold rows without computing a token before it is started anew"
    )
    row_timeout_s: Seconds = Field(
        default=7200.0, description="seconds a row may be in the engine, its queue included, before it fails"
    )
    max_model_len: Count | None = Field(
        default=None, description="prompt and output tokens together; unset: the model's own"
    )
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
    args: dict[str, JsonValue] = Field(default={}, description="any other of vLLM's EngineArgs")
    env: dict[str, str | int | float] = Field(
        default={}, description="environment of the engine's process (VLLM_…, OMP_…)"
    )
    stub: StubSpec = StubSpec()

    @model_validator(mode="after")
    def _no_double(self) -> "EngineSpec":
        elsewhere = {"model": "model", "revision": "revision"} | {n: f"engine.{n}" for n in type(self).model_fields}
        for name in self.args:
            if name in elsewhere:
                raise Misfit(f"has a key of its own; write it as {elsewhere[name]}", "args", name)
        for name, value in self.env.items():
            if not name or "=" in name:
                raise Misfit("is no name that an environment variable can have; write NAME: value", "env", name)
            if _NO_VARIABLE.search(f"{name}{value}"):
                raise Misfit("holds what no environment variable can: a NUL, or half a character", "env", name)
        if self.kind != "stub" and self.stub != StubSpec():
            raise Misfit("needs engine.kind: stub; remove it or set the kind", "stub")
        return self

    @model_validator(mode="after")
    def _no_code(self) -> "EngineSpec":
        if (place := code_setting(self.args)) is not None:
            raise Misfit("would run code that is not vLLM's own, and a job brings none; remove it", "args", *place)
        if (name := code_variable(self.env)) is not None:
            what = "could bring in code, and a job brings none; set it in the environment of the command itself"
            raise Misfit(what, "env", name)
        return self

    def vllm_args(self) -> dict[str, Any]:
        """What is set, as vLLM's EngineArgs."""
        ours = {"config", "kind", "replicas", "args", "env", "stub"}
        ours |= {"max_restarts", "max_attempts", "start_timeout_s", "stall_s", "row_timeout_s"}
        named = {name: value for name, value in self if name not in ours and value is not None}
        return {**named, **self.args}

    def answer_settings(self) -> dict[str, Any]:
        """What of it shapes answers, beside model and request."""
        told = {name: value for name, value in self.vllm_args().items() if name not in _HOW_ALONE}
        return {"kind": self.kind, "args": told} | ({"seed": self.stub.seed} if self.kind == "stub" else {})

    def environment(self) -> dict[str, str]:
        """`env` as a process takes it."""
        return {name: str(value) for name, value in self.env.items()}


class ShardsSpec(Section):
    """How rows are cut into shards; `auto` follows from the data."""

    target_rows: Count | Literal["auto"] = "auto"
    buckets: Annotated[list[Count], Field(min_length=1)] | Literal["auto"] = Field(
        default="auto", description="upper edges of the length ranges, in prompt tokens"
    )

    def rows(self) -> int | None:
        """Rows a shard, None for auto."""
        return None if self.target_rows == "auto" else self.target_rows

    def edges(self) -> list[int] | None:
        """Bucket edges, None for auto."""
        return None if self.buckets == "auto" else self.buckets


class PriceSpec(Section):
    """What the machine costs; without it reports have no money in them."""

    usd_per_hour: Annotated[float, Field(ge=0)] | None = Field(default=None, description="of one replica")


class CacheSpec(Section):
    """Answers that are kept for later runs, of any job: the same request to the same model is not computed again."""

    path: PathText | None = Field(default=None, description="the cache's file, which jobs may share; unset: no cache")
    max_bytes: Annotated[ByteSize, Field(gt=0)] = Field(
        default=ByteSize(10 << 30),
        description="the most that its answers may take, such as 500MB or 10GiB; the least recently used ones go",
    )


class JobSpec(Section):
    """One job, as its YAML file and --set say it."""

    name: Text
    model: Text = Field(description="hub id, folder, demo (a small model for trying out), or stub (no model)")
    revision: Text | None = Field(default=None, description="of a hub model: branch, tag or commit")
    input: InputSpec
    sampling: SamplingSpec = SamplingSpec()
    output: OutputSpec
    engine: EngineSpec = EngineSpec()
    shards: ShardsSpec = ShardsSpec()
    price: PriceSpec = PriceSpec()
    repeats: Literal["once", "each"] = Field(
        default="once",
        description="of rows with the same request whose answer is decided (temperature 0, or a seed of their own), "
        "one is sent and all get its answer; each: every row is sent",
    )
    cache: CacheSpec = CacheSpec()
    reuse: list[PathText] = Field(
        default=[],
        description="earlier outputs of any job, files or folders, whose answers stand for those to the same requests",
    )

    _source: Path = PrivateAttr(Path("job.yaml"))

    @model_validator(mode="after")
    def _stub_model(self) -> "JobSpec":
        if self.model == "stub" and self.engine.kind != "stub":
            raise Misfit("'stub' has no weights; set engine.kind: stub, or name a model", "model")
        return self

    @model_validator(mode="after")
    def _batch_of_its_own(self) -> "JobSpec":
        if self.output.column in self.extra_columns:
            what = f"{self.output.column!r} is a column that bulkgen writes itself"
            raise Misfit(f"{what}; choose another name", "output", "column")
        if self.input.batch and (columns := self.sampling.columns()):
            what = "a batch has its parameters in the rows' bodies, and its columns hold none"
            raise Misfit(f"{what}; give a value, which is the default", "sampling", next(iter(columns)))
        return self

    def model_post_init(self, context: Any) -> None:
        """`load_spec` says in `context` where the spec comes from."""
        if context:
            self._source = context["source"]

    @property
    def source(self) -> Path:
        """The file that the spec was read from."""
        return self._source

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """Those of EXTRA_COLUMNS that the output has: what this job's rows can ask for."""
        return EXTRA_COLUMNS if self.input.batch else self.sampling.extra_columns()

    @property
    def base(self) -> Path:
        """The folder that relative paths start from."""
        return self._source.absolute().parent

    @property
    def output_path(self) -> Path:
        """The output as an absolute path."""
        return Path(os.path.normpath(self.base / self.output.path))

    @property
    def cache_path(self) -> Path | None:
        """The answer cache as an absolute path."""
        return None if self.cache.path is None else self._path(self.cache.path)

    @property
    def reuse_paths(self) -> list[Path]:
        """The earlier outputs as absolute paths."""
        return [self._path(path) for path in self.reuse]

    def _path(self, text: str) -> Path:
        try:
            return Path(os.path.normpath(self.base / Path(text).expanduser()))
        except RuntimeError as e:  # a user who does not exist
            raise SpecError(f"{self.source}: {text}: cannot be found ({e}); give a path that can") from e

    def chat_template_text(self) -> str | None:
        """The chat template that the job brings along. Raises SpecError when its file cannot be read."""
        if self.input.chat_template is None:
            return None
        path = self.base / self.input.chat_template
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise SpecError(f"{self.source}: input.chat_template: {path} cannot be read ({e}); give a text file") from e

    def resolved(self) -> dict[str, Any]:
        """Everything, defaults included, as plain data."""
        return self.model_dump(mode="json")

    @property
    def spec_hash(self) -> str:
        """Changes when anything in the spec does; where the spec lies has no part in it."""
        return hashlib.sha256(json.dumps(self.resolved(), sort_keys=True).encode()).hexdigest()

    def identity_settings(self) -> dict[str, Any]:
        """What makes a row another row when it changes: model, prompt and sampling, and nothing else.

        Raises SpecError when the chat template cannot be read.
        """
        prompt = self.input.model_dump(mode="json", exclude={"path", "id", "allow_empty", "chat_template"})
        return {
            "model": self.model,
            "revision": self.revision,
            "input": prompt | {"chat_template": self.chat_template_text()},
            "sampling": self.sampling.model_dump(mode="json"),
        }


def default_of(key: str) -> Any:
    """The default of a key of the spec, as plain data; None for one that has none."""
    section: type[BaseModel] = JobSpec
    *sections, name = key.split(".")
    for part in sections:
        field = section.model_fields.get(part)
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return None
        section = field.annotation
    known = section.model_fields.get(name)
    default = None if known is None or known.is_required() else known.get_default(call_default_factory=True)
    return default.model_dump(mode="json") if isinstance(default, BaseModel) else default


def spec_json_schema() -> dict[str, Any]:
    """JSON Schema of the job spec."""
    schema = JobSpec.model_json_schema() | {"title": "bulkgen job spec"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def check_collisions(spec: JobSpec, columns: Iterable[str]) -> None:
    """Raise SpecError where a column of the input has a name that bulkgen writes."""
    for name in columns:
        if name == spec.output.column:
            what = f"output.column {name!r} is a column of the input already"
            raise SpecError(f"{spec.source}: {what}; set output.column to a name that the input does not have")
        if name in OWN_COLUMNS or name in spec.extra_columns:
            what = f"column {name!r} of the input has the name of one that bulkgen writes"
            raise SpecError(f"{spec.source}: {what}; rename it in the input")
