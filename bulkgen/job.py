"""The main path: one job spec to one finished output. Read it from `run_job` down.

    job spec → data set → prompts → plan → (replicas: feed → engine → parts) → merge → report

What is committed is in the manifest; a start goes on from there, whatever happened to the one before it.
"""

import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa
import yaml

from bulkgen import __version__
from bulkgen.accounts import last_price, summarize_run
from bulkgen.committed import Committed, last_merge
from bulkgen.dataset import DataSet
from bulkgen.engine.devices import Share
from bulkgen.engine.launcher import LocalLauncher
from bulkgen.engine_setup import Fit, fit_engine, machine_shares, replica_setups, work_of
from bulkgen.errors import EXIT_DONE, EXIT_ROWS_FAILED, OutputError, Stopped
from bulkgen.generation import Generation
from bulkgen.known import KnownAnswers
from bulkgen.limits import FailureLimit
from bulkgen.plan import Plan, find_plan
from bulkgen.preparation import (
    answers_shaped_by,
    check_output,
    context_length,
    open_data,
    open_job_model,
    plan_rows,
    refuse_empty,
)
from bulkgen.profiles import learn_profile
from bulkgen.prompt import Model
from bulkgen.report import Progress, ProgressState, Report, step_windows, write_reports
from bulkgen.results import merge, output_files, write_tables
from bulkgen.rundir import Manifest, RunDir, RunLog, whole_file
from bulkgen.seat import Limits, ReplicaSetup
from bulkgen.secrecy import keep_secret, without_secrets
from bulkgen.settings import Choice, check_settings, settings_key, settings_of
from bulkgen.spec import JobSpec
from bulkgen.stopping import StopFlag

_SHOW_EVERY_S = 1.0
_NAMES_SHOWN, _NAMES_KEPT = 3, 100


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a start ended: 0 or 3 as exit code, and the report over all starts. Other ends are exceptions."""

    exit_code: int
    report: Report
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user says about one start, beside the spec.

    `changed` is the choice where settings differ from those of the rows that are done, `retry` names what is to be
    done once more: `failed`, `truncated`, or error and warning codes.
    """

    changed: Choice | None = None
    retry: Sequence[str] = ()
    failure_limit: FailureLimit = field(default_factory=FailureLimit)


def run_job(spec: JobSpec, progress: Progress, options: Options, stop: StopFlag) -> Outcome:
    """Run a job, or go on with it, until every row is done or failed.

    Raises Stopped when `stop` asks for it, and the other BulkgenErrors for what makes going on impossible; whatever
    was committed until then stays committed.
    """
    keep_secret({**spec.engine.args, **spec.engine.env})
    with stop.at_once():
        run = RunDir.of_output(spec.output_path)
        dataset = open_data(spec)
        model = open_job_model(spec, progress.say)
        check_output(spec, run)
        KnownAnswers(spec, progress.say).check()
    run.create(spec.output.private)
    with run.held():
        start = _Start(spec, run, dataset, model, progress, stop)
        with closing(start.manifest):
            start.heed(options)
            return start.finished() or start.go()


class _Start:
    """One process's work on a run, with what all its stages need."""

    def __init__(
        self,
        spec: JobSpec,
        run: RunDir,
        dataset: DataSet,
        model: Model,
        progress: Progress,
        stop: StopFlag,
    ) -> None:
        self.failure_limit = FailureLimit()
        self.spec = spec
        self.run = run
        self.dataset = dataset
        self.model = model
        self.progress = progress
        self.log = RunLog(run.log)
        self.stop = stop
        self.manifest = Manifest(run.manifest)
        self.committed = Committed(run, self.manifest)
        self.known = KnownAnswers(spec, self.say)
        self.settings = settings_of(spec, model.fingerprint)
        self._shares: list[Share] = []
        self._fit = Fit()
        self._shown_at, self._shown_stage = 0.0, ""
        self._shown = ProgressState()
        self.number = len(self.manifest.of("start")) + 1
        self.max_model_len = context_length(spec, model)
        self.content_key = _digest(
            dataset.fingerprint,
            spec.identity_settings(),
            model.fingerprint,
            spec.input.id,
            self.max_model_len,
        )

    def say(self, text: str) -> None:
        """Tell the user, and whoever reads the log later."""
        self.log.write("said", start=self.number, text=text)
        self.progress.say(text)

    def finished(self) -> Outcome | None:
        """The outcome of the last merge, if nothing came after it and what it was made from and wrote is the same."""
        last = last_merge(self.manifest.records)
        if last is None:
            return None
        if (last["made_of"], last["files"]) != (self._made_of(), self._written_files()):
            return None
        if last_price(self.manifest.records) != self.spec.price.usd_per_hour:
            self.manifest.append({"record": "price", "usd_per_hour": self.spec.price.usd_per_hour})
        return self._outcome(last, "nothing to do: this job is finished and its input unchanged")

    def heed(self, options: Options) -> None:
        """Put on record what the user chose for settings that changed, and what is to be done once more.

        Raises SpecError where settings changed and nothing was chosen.
        """
        choice = options.changed
        if check_settings(self.spec, self.settings, self.manifest.records, choice):
            kept = self.committed.keep(self._plan_of_done()) if choice == "keep" else {}
            key = settings_key(self.settings)
            record = {"record": "changed", "start": self.number, "choice": choice, "settings_key": key}
            self.manifest.append(record | kept)
        self.failure_limit = options.failure_limit
        if options.retry:
            rows = self.committed.retry(options.retry, self.number)
            self.say(f"{rows} rows go again ({', '.join(options.retry)})" if rows else "no row to go again")

    def _plan_of_done(self) -> Plan:
        """The plan of the rows that were done so far. Raises OutputError where it is no longer there."""
        plan = find_plan(self.run.plan, "driver", check=True)
        if plan is None:
            raise OutputError(
                f"{self.run.plan}: the plan of the rows that are done is missing or damaged, and without it nobody can "
                "tell which rows are the same; run the job once with the settings as they were, which makes it again, "
                "or choose --changed again"
            )
        return plan

    def _made_of(self) -> str:
        """What shapes the output: rows, prompts, model and sampling, and how the output is laid out."""
        output = self.spec.output
        return _digest(self.content_key, output.column, output.file_rows)

    def _written_files(self) -> dict[str, list[int]]:
        """Sizes and times of the files that a merge leaves behind, those that are there."""
        facts = {
            path.name: path.stat()
            for path in (*output_files(self.spec.output_path), self.run.failures)
            if path.is_file()
        }
        return {name: [fact.st_size, fact.st_mtime_ns] for name, fact in facts.items()}

    def go(self) -> Outcome:
        """Plan, generate what is pending, merge, report; how it ended is on record in any case."""
        self._begin()
        try:
            plan = self._plan()
            self._answer_known(plan)
            self._generate(plan)
            self._sweep()
            self._remember()
            merged = self._merge(plan)
        except BaseException as e:
            self._end(e)
            raise
        self._end(None, merged["failed"])
        outcome = self._outcome(merged, "")
        self._learn(outcome.report)
        return outcome

    def _begin(self) -> None:
        self._sweep()
        left_out = self.dataset.left_out
        if left_out:
            names = ", ".join(left_out[:_NAMES_SHOWN]) + (", ..." if len(left_out) > _NAMES_SHOWN else "")
            self.say(f"{len(left_out)} file(s) not read, since their names begin with _ or a dot: {names}")
        self._shares = machine_shares(self.spec)
        self._write_job({})
        self.manifest.append(
            {
                "record": "start",
                "start": self.number,
                "time": time.time(),
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "version": __version__,
                "spec": self.spec.spec_hash,
                "base": str(self.spec.base),
                "settings": self.settings,
                "left_out": {"files": len(left_out), "names": left_out[:_NAMES_KEPT]},
                "replicas": self.spec.engine.replicas,
                "usd_per_hour": self.spec.price.usd_per_hour,
            }
        )

    def _write_job(self, chosen: Mapping[str, Any]) -> None:
        """The spec as resolved, and what was chosen for the engines, as far as that is known yet."""
        with whole_file(self.run.job) as path:
            spec = self.spec.resolved()
            job = spec | without_secrets({"engine": spec["engine"], "chosen": chosen})
            path.write_text(yaml.safe_dump(job, sort_keys=False, allow_unicode=True), encoding="utf-8")

    def _choose(self, plan: Plan) -> list[ReplicaSetup]:
        """Engine settings and share of the machine of each replica, for the rows of this plan, and on record."""
        self._fit = fit_engine(self.spec, self.model, plan)
        settings = self._fit.settings
        if self._fit.note:
            self.say(self._fit.note)
        setups = replica_setups(self.spec, self._shares, settings, self.model, self.max_model_len)
        told = [without_secrets({s.name: s.value}) | {"source": s.source, "reason": s.reason} for s in settings]
        self._write_job(
            {
                "settings": told,
                "replicas": [{"args": dict(s.settings.args), "env": dict(s.env)} for s in setups],
            }
        )
        if (serving := self._fit.serving) is not None:
            self.manifest.append({"record": "planned", "start": self.number, **serving.expectations()})
        return setups

    def _sweep(self) -> None:
        """Remove what a killed start or replica left half done: parts that never came into the manifest, temporaries.

        They do no harm where they cannot be removed. Only while no replica runs.
        """
        known = {part["name"] for part in self.manifest.of("part")}
        unknown = [path for path in self.run.parts.glob("part-s*.parquet") if path.name not in known]
        for path in [*self.run.temporaries(), *unknown]:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    # ---- plan ----

    def _plan(self) -> Plan:
        began = time.monotonic()
        with self.run.kept_private():
            plan = self._planned_before() or plan_rows(
                self.spec,
                self.dataset,
                self.model,
                self.run,
                {"made_from": self._plan_made_from()},
                self.failure_limit,
                self.stop.check,
                self._show_planning,
                self.committed.kept_content,
            )
        self.committed.mark(plan)
        pending = [plan.pending(shard) for shard in plan.shards]
        rows, prompt_tokens, budget_tokens = (sum(p[i] for p in pending) for i in range(3))
        rows += plan.following
        self.manifest.append(
            {
                "record": "plan",
                "start": self.number,
                "plan": self.number,
                "rows": plan.rows,
                "refused": plan.refused,
                "already_done": plan.rows - plan.refused - rows,
                "pending": rows,
                "following": plan.following,
                "prompt_tokens": prompt_tokens,
                "budget_tokens": budget_tokens,
                "shards": len(plan.shards),
                "plan_s": time.monotonic() - began,
                "fingerprint": self.dataset.fingerprint,
            }
        )
        return plan

    def _plan_made_from(self) -> str:
        """What shapes the plan: the rows as sent, and how they are cut into shards."""
        kept = self.committed.kept_content
        shards = self.spec.shards.model_dump(mode="json")
        return _digest(
            self.content_key,
            shards,
            self.spec.engine.replicas,
            kept and [kept.columns],
            self.spec.repeats,
            answers_shaped_by(self.spec, self.model),
        )

    def _planned_before(self) -> Plan | None:
        """The plan that an earlier start left, if it is whole, and of the same input and settings."""
        plan = find_plan(self.run.plan, "driver", check=True)
        return plan if plan is not None and plan.facts["made_from"] == self._plan_made_from() else None

    def _show_planning(self, rows: int, refused: int) -> None:
        self._show("planning", ProgressState(rows=rows, refused=refused))

    def _show(self, stage: str, state: ProgressState, force: bool = False) -> None:
        """Tell the terminal, and other processes through progress.json, at most once a second."""
        self.progress.stage(stage)
        self.progress.update(state)
        now = time.monotonic()
        if not force and stage == self._shown_stage and now < self._shown_at + _SHOW_EVERY_S:
            return
        if stage != self._shown_stage:
            self.log.write("stage", start=self.number, stage=stage)
        self._shown_at, self._shown_stage, self._shown = now, stage, state
        about = {
            "time": time.time(),
            "start": self.number,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "stage": stage,
        }
        text = json.dumps(about | asdict(state) | {"replicas": self.spec.engine.replicas})
        self.run.show(text)

    # ---- known answers ----

    def _answer_known(self, plan: Plan) -> None:
        """Rows to which the cache or an earlier output has the answer are done with it."""
        if not self.known or not plan.has_pending():
            return
        rows = 0
        with self.run.kept_private():
            found = self.known.answer(plan, self.committed.reopened, settings_key(self.settings), self.stop.check)
            for number, answered in enumerate(found, 1):
                name = f"part-s{self.number:04d}-known-{number:06d}.parquet"
                write_tables(self.run.parts, name, [answered.part])
                self.committed.add(plan, self.number, name, answered.ordinals)
                plan.spare(answered.ordinals)
                rows += len(answered.ordinals)
        self.say(f"{rows:,} rows are done with answers that were known before")

    def _remember(self) -> None:
        """What was generated is in the cache from now on, if the job has one."""
        if self.spec.cache_path is None:
            return
        cache = str(self.spec.cache_path)
        # One that was removed since gets all of them once more.
        parts = self.committed.not_in_cache(cache) if self.known.has_cache() else self.committed.parts()
        if parts and self.known.remember(parts, self.stop.check):
            self.committed.in_cache(cache, self.number)

    # ---- generate ----

    def _generate(self, plan: Plan) -> None:
        if not plan.has_pending():
            return
        generation = Generation(
            run=self.run,
            manifest=self.manifest,
            plan=plan,
            start=self.number,
            launcher=LocalLauncher("bulkgen.replica"),
            setups=self._choose(plan),
            work=work_of(self.spec, self.run, self.number, settings_key(self.settings)),
            settings_key=settings_key(self.settings),
            limits=Limits(
                max_restarts=self.spec.engine.max_restarts,
                start_timeout_s=self.spec.engine.start_timeout_s,
                stall_s=self.spec.engine.stall_s,
                failures=self.failure_limit,
            ),
            show=self._show,
            say=self.say,
            stopped=lambda: bool(self.stop),
        )
        if not generation.run():
            self.stop.check()

    # ---- merge and report ----

    def _merge(self, plan: Plan) -> dict[str, Any]:
        """Put results and input together in input order; returns what is on record about it."""
        self._check_input()
        began = time.monotonic()
        state = ProgressState(rows=plan.rows, refused=plan.refused)
        self._show("merging", state)
        schema = pa.ipc.read_schema(pa.py_buffer(self.run.schema.read_bytes()))

        self.manifest.append({"record": "merging", "start": self.number, "time": time.time()})

        def merged(rows: int) -> None:
            self.stop.check()
            self._show("merging", ProgressState(rows=plan.rows, done=rows))

        result = merge(
            parts=self.committed.parts(),
            keys=plan,
            tables=self.dataset.tables(schema),
            refused=self.run.refused,
            input_schema=schema,
            output=self.spec.output_path,
            text_column=self.spec.output.column,
            file_rows=self.spec.output.file_rows,
            failures=self.run.failures,
            scratch=self.run.path,
            progress=merged,
            extra_columns=self.spec.extra_columns,
            check=self._check_input,
        )
        self.manifest.append(
            {
                "record": "merged",
                "start": self.number,
                "plan": self.number,
                "time": time.time(),
                "merge_s": time.monotonic() - began,
                "rows": result.rows,
                "done": result.done,
                "failed": result.failed,
                "made_of": self._made_of(),
                "files": self._written_files(),
            }
        )
        return self.manifest.records[-1]

    def _check_input(self) -> None:
        if open_data(self.spec).fingerprint != self.dataset.fingerprint:
            raise Stopped("the input changed while the job ran; run it again, only what is new will be generated")

    def _outcome(self, merged: Mapping[str, Any], note: str) -> Outcome:
        report = summarize_run(self.run, self.manifest.records)
        write_reports(report, self.run)
        refuse_empty(self.spec, self.dataset, merged["rows"])
        return Outcome(EXIT_ROWS_FAILED if merged["failed"] else EXIT_DONE, report, note)

    def _learn(self, report: Report) -> None:
        """Keep how long the steps of this start took, for the next plan."""
        if self._fit.key is None:
            return
        ready = [record for record in self.manifest.of("ready") if record["start"] == self.number]
        kv_tokens = {(record["replica"], record["incarnation"]): record["kv_tokens"] for record in ready}
        learn_profile(self._fit.key, step_windows(report.timeline, self.number, kv_tokens))

    def _end(self, error: BaseException | None, failed: int = 0) -> None:
        if error is None:
            outcome, code, message = "finished", EXIT_ROWS_FAILED if failed else EXIT_DONE, ""
        else:
            outcome = "stopped" if isinstance(error, Stopped) else "failed"
            code, message = getattr(error, "exit_code", 1), str(error)
        self._show(outcome, self._shown, force=True)
        self.log.write("end", start=self.number, outcome=outcome, exit_code=code, message=message)
        self.manifest.append(
            {
                "record": "end",
                "start": self.number,
                "time": time.time(),
                "outcome": outcome,
                "exit_code": code,
                "message": message,
            }
        )


def _digest(*facts: Any) -> str:
    return hashlib.blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
