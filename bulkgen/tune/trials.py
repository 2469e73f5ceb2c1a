"""Measuring settings: an engine with them, on a sample of the data set, by the same code as in a run.

Each sample is a run folder of its own inside a temporary one: a plan of the chosen rows, which every candidate has
wholly to do, one start after the other. Nothing is written where the job's output is.
"""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bulkgen.engine.launcher import LocalLauncher
from bulkgen.engine_setup import Fit, fit_rows, machine_shares, replica_setups, work_of
from bulkgen.errors import EngineError
from bulkgen.generation import Generation
from bulkgen.limits import FailureLimit
from bulkgen.plan import Plan
from bulkgen.preparation import context_length, copy_rows
from bulkgen.prompt import Model
from bulkgen.report import Progress
from bulkgen.rundir import Manifest, RunDir
from bulkgen.seat import Limits, ReplicaSetup
from bulkgen.sizing import Device, Measured, Rows
from bulkgen.spec import JobSpec
from bulkgen.tune.candidates import Candidate
from bulkgen.tune.rounds import Trial
from bulkgen.tune.sample import stratified

_SEED = 0
_SETTINGS_KEY = "tune"


class Trials:
    """Engines one after the other, each on a sample of a plan.

    `check` is called several times a second while an engine runs; what it raises ends the engine at once.
    """

    def __init__(
        self,
        spec: JobSpec,
        model: Model,
        plan: Plan,
        rows: Rows,
        device: Device,
        folder: Path,
        progress: Progress,
        check: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._model = model
        self._plan = plan
        self._rows = rows
        self.device = device
        self._folder = folder
        self._progress = progress
        self._check = check
        self.shares = machine_shares(spec)
        self._sampled = _in_sampling_order(plan)
        self._samples: dict[int, tuple[RunDir, Plan]] = {}
        self._number = 0

    @property
    def most_rows(self) -> int:
        """Rows that a sample can have."""
        return len(self._sampled)

    def fit(self, candidate: Candidate) -> Fit:
        """All settings with those of a candidate in place, as a later run would have them."""
        measured = Measured(choices={name: (value, "tried") for name, value in candidate.changes})
        return fit_rows(self._spec, self._model, self._rows, self.device, measured)

    def measure(self, candidate: Candidate, rows: int) -> Trial:
        """Generate a sample with a candidate's settings. What cannot be done is a trial with a fault."""
        self._check()
        began = time.monotonic()
        self._number += 1
        self._progress.stage(f"trial {self._number}: {candidate.name}, {rows:,} rows")
        fit = self.fit(candidate)
        if fit.serving is not None and fit.serving.fault and self._spec.engine.kind == "vllm":
            return Trial(candidate=candidate, rows=rows, fault=fit.serving.fault)
        setups = replica_setups(
            self._spec, self.shares, fit.settings, self._model, context_length(self._spec, self._model)
        )
        run, plan = self._sample(rows)
        plan.forget_commits()
        manifest = Manifest(run.manifest)
        try:
            self._generate(run, plan, manifest, setups)
        except EngineError as e:
            # The log that it points to is gone when somebody reads this.
            return Trial(candidate=candidate, rows=rows, fault=str(e).partition("; see ")[0])
        finally:
            manifest.close()
            for part in run.parts.iterdir():
                part.unlink()
        return self._trial(candidate, rows, manifest, time.monotonic() - began)

    def _sample(self, rows: int) -> tuple[RunDir, Plan]:
        if rows not in self._samples:
            run = RunDir(self._folder / f"sample-{rows}")
            run.create()
            self._samples[rows] = (
                run,
                copy_rows(self._spec, self._model, self._plan, self._sampled[:rows].tolist(), run),
            )
        return self._samples[rows]

    def _generate(self, run: RunDir, plan: Plan, manifest: Manifest, setups: list[ReplicaSetup]) -> None:
        engine = self._spec.engine

        def stopped() -> bool:
            self._check()
            return False

        Generation(
            run=run,
            manifest=manifest,
            plan=plan,
            start=self._number,
            launcher=LocalLauncher("bulkgen.replica"),
            setups=setups,
            work=work_of(self._spec, run, self._number, _SETTINGS_KEY),
            settings_key=_SETTINGS_KEY,
            # An engine that dies of its settings is a finding, and one that is started again no measurement.
            limits=Limits(
                max_restarts=0,
                start_timeout_s=engine.start_timeout_s,
                stall_s=engine.stall_s,
                failures=FailureLimit(share=1.0),
            ),
            show=lambda stage, state: self._progress.update(state),
            # How an engine died is the fault of its trial; how it ended does not matter.
            say=lambda text: None,
            stopped=stopped,
        ).run()

    def _trial(self, candidate: Candidate, rows: int, manifest: Manifest, took_s: float) -> Trial:
        """What the manifest has of the last start, as `bulkgen report` would count it."""
        parts = [part for part in manifest.of("part") if part["start"] == self._number]
        ready = [record["start_s"] for record in manifest.of("ready") if record["start"] == self._number]
        began = [part["first_offered_at"] for part in parts if part["first_offered_at"] is not None]
        ended = [part["last_completed_at"] for part in parts if part["last_completed_at"] is not None]
        if not began or not ended:
            return Trial(candidate=candidate, rows=rows, fault="no row of the sample was finished")
        trial = Trial(
            candidate=candidate,
            rows=rows,
            took_s=took_s,
            start_s=max(ready, default=0.0),
            generate_s=max(ended) - min(began),
            tokens=sum(part["prompt_tokens"] + part["output_tokens"] for part in parts),
            failed=sum(part["failed"] for part in parts),
        )
        self._progress.say(
            f"{candidate.name}: {rows:,} rows in {trial.generate_s:.1f} s, {trial.rate:,.0f} tokens/s "
            f"(engine start {trial.start_s:.1f} s)"
        )
        return trial


def _in_sampling_order(plan: Plan) -> npt.NDArray[np.int64]:
    """Ordinals of the rows that a run would send: the first of them, however many, are a stratified sample."""
    rows = plan.index()
    ordinals = rows["ordinal"][stratified(rows["prompt_tokens"], rows["max_tokens"], _SEED)]
    found: npt.NDArray[np.int64] = ordinals[plan.sent[ordinals]]
    return found
