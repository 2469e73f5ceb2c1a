"""What a start needs before an engine is loaded: data, model, renderer, plan, and every check that can be made
without one. A job that cannot work should end here, in seconds.
"""

import difflib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bulkgen.dataset import DataSet, open_dataset
from bulkgen.engine.demo_model import prepare_demo_model
from bulkgen.errors import InputError, OutputError, SpecError, TooManyFailures
from bulkgen.feed import PRIOR_SHARE, shard_order
from bulkgen.limits import FailureLimit
from bulkgen.plan import Plan, PlanWriter, RequestHasher, bucket_edges
from bulkgen.prompt import BatchRenderer, ContentHash, Model, PromptSource, Renderer, open_model, way_round
from bulkgen.records import BadRow, Prompt, RefusedRow
from bulkgen.results import RefusedWriter
from bulkgen.rundir import RunDir, read_manifest
from bulkgen.spec import JobSpec, check_collisions, check_sampling_value

Tokens = npt.NDArray[np.int64]
# Sequences that an engine runs side by side, as far as the order of shards depends on it.
_SEQUENCES = 256


def open_data(spec: JobSpec) -> DataSet:
    """The job's input files; the job's own output and run folder are never among them."""
    output = spec.output_path
    return open_dataset(spec.input.paths, spec.base, exclude=(output, RunDir.of_output(output).path))


def open_job_model(spec: JobSpec, say: Callable[[str], None]) -> Model:
    """The model's tokenizer and facts, not its weights; the demo model is prepared if it was not yet."""
    model = open_model(spec.model, spec.revision, _model_folder(spec, say))
    # What the stub makes up must never stand for answers of the model whose tokenizer it borrows.
    return replace(model, fingerprint=f"{spec.engine.kind}:{model.fingerprint}")


def _model_folder(spec: JobSpec, say: Callable[[str], None]) -> Path | None:
    """Where the model lies on this machine, None for one that must be a hub's."""
    if spec.model == "demo":
        return prepare_demo_model(say)
    try:
        folder = spec.base / Path(spec.model).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError) as e:  # a name too long for a file, or a user who does not exist
        reason = e.strerror if isinstance(e, OSError) else str(e).rstrip(".")
        raise SpecError(f"model {spec.model[:200]}: cannot be looked up ({reason}); give a hub id or a folder") from e


def context_length(spec: JobSpec, model: Model) -> int:
    """Tokens that prompt and output may have together: the spec's wish, else what the model was made for."""
    length = spec.engine.max_model_len or model.context_length
    if length is None:
        raise SpecError(f"model {spec.model}: its config names no context length; set engine.max_model_len")
    return length


def check_output(spec: JobSpec, run: RunDir) -> None:
    """Refuse an output that is not this job's to write. Raises OutputError before anything is made."""
    output = spec.output_path
    if output.suffix == ".parquet" and output.is_dir():
        raise OutputError(f"{output}: is a folder; give output.path a file name ending in .parquet, or no suffix")
    if output.suffix != ".parquet" and output.is_file():
        raise OutputError(f"{output}: is a file; give output.path a name ending in .parquet, or a folder")
    if run.manifest.exists() or not output.exists():
        return
    ours = (run.path.name, ".")
    foreign = [output] if output.is_file() else sorted(p for p in output.iterdir() if not p.name.startswith(ours))
    if foreign:
        names = ", ".join(p.name for p in foreign[:3])
        raise OutputError(
            f"{output}: holds what bulkgen did not write ({names}); move it away or choose another output.path"
        )


def open_job_renderer(spec: JobSpec, model: Model, check_stop: Callable[[], None] = lambda: None) -> Renderer:
    """The renderer of a job's rows. Raises SpecError for templates that cannot work for any row."""
    prompts = PromptSource(
        id=spec.input.id_column,
        messages=spec.input.messages,
        prompt=spec.input.prompt,
        template=spec.input.template,
        system=spec.input.system,
        chat=spec.input.chat,
        chat_template=spec.chat_template_text(),
        continue_final=spec.input.continue_final,
        special_tokens=spec.input.special_tokens,
        too_long=spec.input.too_long,
        now=_begun_at(RunDir.of_output(spec.output_path)),
    )
    if spec.input.batch:
        return BatchRenderer(
            model,
            prompts,
            defaults=spec.sampling.constants(),
            max_model_len=context_length(spec, model),
            job_model=spec.model,
            any_model=spec.input.batch_model == "ignore",
        )
    return Renderer(
        model,
        prompts,
        constants=spec.sampling.constants(),
        columns=spec.sampling.columns(),
        check=check_sampling_value,
        max_model_len=context_length(spec, model),
        check_stop=check_stop,
    )


def _begun_at(run: RunDir) -> datetime | None:
    """When the run was started first, None if it never was: the date that chat templates are told in all starts."""
    starts = [record for record in read_manifest(run.manifest) if record["record"] == "start"]
    return datetime.fromtimestamp(starts[0]["time"]) if starts else None


def plan_rows(
    spec: JobSpec,
    dataset: DataSet,
    model: Model,
    run: RunDir,
    facts: dict[str, Any],
    limit: FailureLimit,
    check_stop: Callable[[], None],
    show: Callable[[int, int], None],
    kept: ContentHash | None = None,
) -> Plan:
    """Read, render and count every row, once, into a new plan folder.

    `facts` say what the plan is made from; `show` is told rows read and rows refused so far; `kept` says what to hash
    of rows so that those are found whose results are kept.
    Raises SpecError when a column that the job names is in no row at all, TooManyFailures when more rows are refused
    than `limit` allows.
    """
    renderer = open_job_renderer(spec, model, check_stop)
    if (known := dataset.known_columns()) is not None:
        check_columns(spec, renderer.required, known)
    own = ContentHash(renderer.columns)
    kept = kept or own
    content_of = partial(_contents, own, kept)
    read = None if own.columns is None or kept.columns is None else {*own.columns, *kept.columns}
    edges = bucket_edges(spec.shards.edges(), context_length(spec, model))
    hasher = RequestHasher(answers_shaped_by(spec, model), spec.sampling.constants())
    writer = PlanWriter(run.plan, edges, hasher, once=spec.repeats == "once")
    refused: RefusedWriter | None = None
    try:
        refused = RefusedWriter(writer.folder / run.refused.name)
        rows = 0
        first_refused: RefusedRow | None = None
        for batch in dataset.rows(read):
            check_stop()
            rendered = renderer.render(batch, check_stop)
            writer.add(rendered, [*map(content_of, batch.rows, rendered)])
            refused.add([row for row in rendered if isinstance(row, RefusedRow)])
            rows += len(rendered)
            first_refused = first_refused or next((r for r in rendered if isinstance(r, RefusedRow)), None)
            if first_refused is not None and (too_many := limit.exceeded(refused.rows, rows)) is not None:
                check_models(spec, dataset, renderer, rows - refused.rows)
                raise TooManyFailures(_plainly_wrong(too_many, first_refused))
            show(rows, refused.rows)
        refused.close()
        schema = dataset.schema()
        if rows:
            check_columns(spec, renderer.required, dataset.columns_seen())
        check_models(spec, dataset, renderer, rows - refused.rows)
        (writer.folder / run.schema.name).write_bytes(schema.serialize().to_pybytes())
        facts = facts | {"content_columns": own.columns}
        return writer.finish(facts, spec.shards.rows(), spec.engine.replicas, partial(_shard_order, spec))
    except BaseException:
        if refused is not None:
            refused.give_up()
        writer.discard()
        raise


def plan_aside(
    spec: JobSpec,
    dataset: DataSet,
    model: Model,
    folder: Path,
    check_stop: Callable[[], None],
    show: Callable[[int, int], None],
) -> Plan:
    """As `plan_rows`, to look at the plan and not to run it: in a folder of its own, however many rows are refused."""
    no_limit = FailureLimit(share=1.0)
    return plan_rows(spec, dataset, model, RunDir(folder), {"made_from": ""}, no_limit, check_stop, show)


def answers_shaped_by(spec: JobSpec, model: Model) -> str:
    """What shapes the answers of all rows, beside what each asks: model and settings, the same in all runs."""
    return json.dumps([model.fingerprint, spec.engine.answer_settings()], sort_keys=True)


def copy_rows(spec: JobSpec, model: Model, plan: Plan, ordinals: Collection[int], run: RunDir) -> Plan:
    """Some rows of a plan as a plan of their own, cut and put in order as a run does it with all of them."""
    chosen = frozenset(ordinals)
    rows = sorted((row for shard in plan.shards for row in plan.read(shard, chosen)), key=lambda row: row.ordinal)
    prompts = [
        Prompt(ordinal, row.key, row.tokens.tolist(), row.max_tokens, row.overrides, row.warnings)
        for ordinal, row in enumerate(rows)
    ]
    writer = PlanWriter(run.plan, bucket_edges(spec.shards.edges(), context_length(spec, model)))
    try:
        writer.add(prompts, [(0, 0)] * len(prompts))
        return writer.finish({}, spec.shards.rows(), spec.engine.replicas, partial(_shard_order, spec))
    except BaseException:
        writer.discard()
        raise


def _shard_order(spec: JobSpec, prompt_tokens: Tokens, budgets: Tokens, largest: Tokens) -> Tokens:
    sequences = spec.engine.replicas * (spec.engine.max_num_seqs or _SEQUENCES)
    return shard_order(prompt_tokens, PRIOR_SHARE * budgets, PRIOR_SHARE * largest, sequences=sequences)


def _contents(
    own: ContentHash, kept: ContentHash, row: Mapping[str, Any] | BadRow, rendered: Prompt | RefusedRow
) -> tuple[int, int]:
    if isinstance(row, BadRow) or isinstance(rendered, RefusedRow):
        return 0, 0  # never done, so never kept
    content = own.of(row)
    return content, content if kept.columns == own.columns else kept.of(row)


def check_models(spec: JobSpec, dataset: DataSet, renderer: Renderer, sent: int) -> None:
    """Raise SpecError where no line of a batch could be sent since they name other models than the job's."""
    foreign = renderer.foreign if isinstance(renderer, BatchRenderer) else {}
    if sent or not foreign:
        return
    models = []
    for name, lines in sorted(foreign.items(), key=lambda item: -item[1].rows)[:3]:
        of_file = f" of {lines.file}" if len(dataset.files) > 1 else ""
        rows = f"{lines.rows} row" + ("s" if lines.rows > 1 else "")
        models.append(f"{name} ({rows}, first line {lines.position}{of_file})")
    more = ["others"] if len(foreign) > 3 else []
    verb = "is" if len(foreign) == 1 else "are"
    what = f"{', '.join([*models, *more])} {verb} not {spec.model}"
    raise SpecError(f"{spec.source}: {what}; set input.batch_model: ignore, or name the model that the lines name")


def _plainly_wrong(too_many: str, first: RefusedRow) -> str:
    return (
        f"{too_many} before an engine was loaded, the first being {first.file}:{first.position}: {first.code}: "
        f"{first.message}; mend the job or the input, or go on all the same with --max-failures 100%"
    )


def check_columns(spec: JobSpec, required: Collection[str], columns: Collection[str]) -> None:
    """Raise SpecError for a column that the job needs and no row has, or that bulkgen would add a second time."""
    in_templates = f"{spec.input.template or ''} {spec.input.system or ''}"
    for name in sorted(set(required) - set(columns)):
        near = difflib.get_close_matches(name, columns, 1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(map(repr, sorted(columns)))}"
        hint = (way_round([name], columns) if name in in_templates else "") or hint
        raise SpecError(f"{spec.source}: column {name!r} is in no row of {', '.join(spec.input.paths)}{hint}")
    check_collisions(spec, columns)


def refuse_empty(spec: JobSpec, dataset: DataSet, rows: int) -> None:
    """Raise InputError when there was nothing to do and the job does not say that this is in order."""
    if rows == 0 and not spec.input.allow_empty:
        raise InputError(
            f"{', '.join(spec.input.paths)}: no rows in {len(dataset.files)} file(s), and none in the output; check "
            "the path, or set input.allow_empty: true where an empty input is in order"
        )
