"""`bulkgen tune`: measures a few engine settings on a sample of this data set, and keeps the best.

The way: plan (in a temporary folder) → candidates → successive halving over trials → what was found, kept by
`profiles.py` under model, device, vLLM and the shape of the data set. Later plans and runs look there.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bulkgen.engine_setup import Fit, device_here, measured_rows, tuned_key
from bulkgen.errors import SpecError
from bulkgen.preparation import open_data, open_job_model, plan_aside, refuse_empty
from bulkgen.profiles import Tuned, WorkShape, keep_tuned
from bulkgen.prompt import Model
from bulkgen.report import Progress, ProgressState
from bulkgen.secrecy import keep_secret
from bulkgen.sizing import Architecture, Rows, Setting, physical_cores
from bulkgen.spec import JobSpec
from bulkgen.stopping import StopFlag
from bulkgen.tune.candidates import ANSWERS_CHANGE, RESOLVED, THREADS, Ground, pinned_names, propose
from bulkgen.tune.halving import Findings, Halving, TimeOver
from bulkgen.tune.trials import Trials

# Of the budget, what the first sample should take: it is measured many times, and larger ones follow.
_FIRST_SHARE = 0.1
_FIRST_ROWS, _LEAST_ROWS = 256, 16
# Variables that say how many threads compute.
_THREAD_VARIABLES = frozenset((THREADS, "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What came of tuning a job. `pinned`: settings that were left alone since the job sets them.

    `kept`: whether later runs will know; `took_s`: all of it, planning included.
    """

    name: str
    settings: tuple[Setting, ...]
    pinned: tuple[str, ...]
    findings: Findings
    tuned: Tuned
    kept: bool
    budget_s: float
    took_s: float


def tune_job(spec: JobSpec, budget_s: float, allow: Sequence[str], progress: Progress, stop: StopFlag) -> Tuning:
    """Measure engine settings for a job within `budget_s` seconds, and keep what is best.

    `allow`: settings that change answers and may be tried all the same; they are reported and never kept. Raises what
    a run would raise for a job that cannot work, SpecError for a budget that is too little to compare anything, and
    Stopped; nothing is left behind but what is kept.
    """
    began = time.monotonic()
    until = began + budget_s
    keep_secret({**spec.engine.args, **spec.engine.env})
    allowed = _check_allowed(spec, allow)

    def check() -> None:
        stop.check()
        if time.monotonic() >= until:
            raise TimeOver

    with tempfile.TemporaryDirectory(prefix="bulkgen-tune-", ignore_cleanup_errors=True) as folder:
        try:
            with stop.at_once():
                progress.stage("planning")
                dataset, model = open_data(spec), open_job_model(spec, progress.say)
                plan = plan_aside(
                    spec,
                    dataset,
                    model,
                    Path(folder) / "whole",
                    check,
                    lambda rows, refused: progress.update(ProgressState(rows=rows, refused=refused)),
                )
                refuse_empty(spec, dataset, plan.rows)
                rows = measured_rows(spec, plan)
                device = device_here()
                trials = Trials(spec, model, plan, rows, device, Path(folder), progress, check)
                resolved = trials.fit(RESOLVED)
            findings, pinned = _search(spec, model, rows, resolved, allowed, trials, budget_s, until)
        except TimeOver:
            raise SpecError(_too_little(budget_s, "reading and counting the rows took all of it")) from None
    stop.check()
    if findings.ended != "nothing to try" and not findings.conclusive:
        raise SpecError(_too_little(budget_s, _what_it_took(findings)))
    tuned = _tuned(findings, resolved.settings, rows)
    kept = findings.ended != "nothing to try" and keep_tuned(tuned_key(spec, model, device), tuned)
    return Tuning(
        name=spec.name,
        settings=resolved.settings,
        pinned=tuple(pinned),
        findings=findings,
        tuned=tuned,
        kept=kept,
        budget_s=budget_s,
        took_s=time.monotonic() - began,
    )


def _check_allowed(spec: JobSpec, allow: Sequence[str]) -> frozenset[str]:
    for name in allow:
        if name not in ANSWERS_CHANGE:
            raise SpecError(f"--allow {name}: no such setting; there are: {', '.join(sorted(ANSWERS_CHANGE))}")
        if name in spec.engine.vllm_args():
            raise SpecError(f"--allow {name}: the job sets it, and what it sets is never varied; remove one of them")
    return frozenset(allow)


def _search(
    spec: JobSpec,
    model: Model,
    rows: Rows,
    resolved: Fit,
    allowed: frozenset[str],
    trials: Trials,
    budget_s: float,
    until: float,
) -> tuple[Findings, list[str]]:
    """Successive halving over what the job leaves open; also what it does not."""
    given = {*spec.engine.vllm_args(), *_given_variables(spec)}
    ground = _ground(spec, model, rows, resolved, trials)
    candidates = propose(resolved.settings, given, ground, allowed)
    halving = Halving(
        candidates,
        trials.measure,
        clock=time.monotonic,
        until=until,
        job_rows=trials.most_rows,
        most_rows=trials.most_rows,
        first_rows=_first_rows(spec, resolved, trials.most_rows, budget_s),
    )
    return halving.run(), pinned_names(resolved.settings, given, ground)


def _given_variables(spec: JobSpec) -> set[str]:
    """Variables that the job sets; one that says how many threads compute stands for all that do."""
    own = set(spec.engine.environment())
    return own | {THREADS} if own & _THREAD_VARIABLES else own


def _ground(spec: JobSpec, model: Model, rows: Rows, resolved: Fit, trials: Trials) -> Ground:
    values = {setting.name: setting.value for setting in resolved.settings}
    replicas = spec.engine.replicas
    sequences = max(1, rows.answers // replicas)
    most = min(sequences, int(values["max_num_seqs"]))
    cores = trials.shares[0].cores or ()
    return Ground(
        device=trials.device.kind,
        sequences=sequences,
        running=most if resolved.serving is None else min(most, resolved.serving.running),
        prompt_tokens=int(rows.prompt.sum()) // replicas,
        small_blocks=_takes_small_blocks(model),
        replicas=replicas,
        whole_prompts=spec.engine.vllm_args().get("enable_chunked_prefill") is False,
        cores=len(cores),
        physical_cores=physical_cores(cores),
    )


def _takes_small_blocks(model: Model) -> bool:
    try:
        groups = Architecture.of(model.config).groups
    except Exception:  # as in engine_setup: what the arithmetic does not know is no reason to end
        return False
    return all(group.cache.kind == "full" for group in groups)


def _first_rows(spec: JobSpec, resolved: Fit, most_rows: int, budget_s: float) -> int:
    """Rows of the first sample: enough to fill the engines, as far as a tenth of the budget goes."""
    values = {setting.name: setting.value for setting in resolved.settings}
    fill = int(values["max_num_seqs"]) * spec.engine.replicas
    serving = resolved.serving
    if serving is None or spec.engine.kind != "vllm" or serving.device.source == "none":
        wanted = min(fill, _FIRST_ROWS)
    else:
        row_s = serving.seconds.expected / max(1, most_rows)
        wanted = min(fill, int(_FIRST_SHARE * budget_s / max(row_s, 1e-9)))
    return max(1, min(most_rows, max(_LEAST_ROWS, wanted)))


def _too_little(budget_s: float, why: str) -> str:
    return f"--budget: {budget_s:,.0f} s are too little to compare anything: {why}; give more. Nothing was kept"


def _what_it_took(findings: Findings) -> str:
    trials = [trial for trials in findings.rounds for trial in trials]
    if not trials:
        return "the first engine had not finished its sample when it was over"
    last = trials[0]
    each = f"an engine start took {last.start_s:.0f} s and a sample of {last.rows:,} rows {last.generate_s:.0f} s"
    return f"{each}, and at least three of both are needed"


def _tuned(findings: Findings, settings: Sequence[Setting], rows: Rows) -> Tuned:
    """What is to be kept: what was faster, else that nothing was.

    Whether to compile is kept in either case where it was tried: what runs teach would change it later.
    """
    before = {setting.name: setting.value for setting in settings}
    best = findings.best
    values = {} if best is None else best.candidate.values
    tried = {name for candidate in findings.tried for name in candidate.values if not candidate.answers_change}
    confirmed = {"enforce_eager": before["enforce_eager"]} if "enforce_eager" in tried - values.keys() else {}
    return Tuned(
        shape=WorkShape.of(rows),
        values=values,
        instead_of={name: before.get(name, "one a core") for name in values},
        confirmed=confirmed,
        tried=sorted(tried - values.keys() - confirmed.keys()),
        gain=0.0 if best is None else best.gain,
        margin=findings.margin or 0.0,
        rows=max((trial.rows for trials in findings.rounds for trial in trials), default=0),
        measured_at=time.time(),
    )
