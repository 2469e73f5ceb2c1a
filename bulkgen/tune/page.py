"""What tuning found, as tables and as JSON. Only looks: nothing is computed here."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from bulkgen.report import Sheet, figures
from bulkgen.tune.candidates import RESOLVED
from bulkgen.tune.halving import Ended
from bulkgen.tune.rounds import Standing, Trial
from bulkgen.tune.tune import Tuning

_ENDED: Mapping[Ended, str] = {
    "decided": "the fastest was left, and was measured once more",
    "none faster": "nothing was faster than the resolved settings",
    "noise": "what was left differed by no more than the resolved settings from themselves",
    "time": "no time was left for more",
}


def tuning_tables(tuning: Tuning) -> list[Sheet]:
    """What people see, the result last."""
    sheets = [_round(tuning, number) for number, trials in enumerate(tuning.findings.rounds, 1) if trials]
    return [*sheets, Sheet("Result", ("", ""), list(_result(tuning)))]


def _round(tuning: Tuning, number: int) -> Sheet:
    trials = tuning.findings.rounds[number - 1]
    gains = {standing.candidate: standing.gain for standing in tuning.findings.standings[number - 1]}
    rows = [_trial_row(trial, gains.get(trial.candidate)) for trial in trials]
    headers = ("settings", "generation", "tokens/s", "gain", "engine start", "")
    first_look = all(trial.candidate == RESOLVED for trial in trials)
    what = "a first look" if first_look else f"round {number}"
    title = f"{tuning.name}: {what}, a sample of {figures.rows(trials[0].rows)}"
    return Sheet(title, headers, rows, right=range(1, 5))


def _trial_row(trial: Trial, gain: float | None) -> tuple[str, ...]:
    if trial.fault:
        return (trial.candidate.name, "-", "-", "-", "-", trial.fault)
    failed = f"{figures.rows(trial.failed)} failed" if trial.failed else ""
    shown = "" if trial.candidate == RESOLVED else "-" if gain is None else f"{gain:+.1%}"
    times = (figures.seconds(trial.generate_s), figures.rate(trial.rate), shown, figures.seconds(trial.start_s))
    return (trial.candidate.name, *times, failed)


def _result(tuning: Tuning) -> Iterator[tuple[str, str]]:
    found = tuning.findings
    yield "best", verdict(tuning)
    if found.margin is not None:
        yield "noise", f"a gain counts from {found.margin:.1%} on, by how the resolved settings repeat"
        yield "ended", _ENDED[found.ended]
    for standing in found.aside:
        yield "changes answers", _aside(standing, found.margin)
    for candidate, why in found.not_tried:
        yield "not tried", f"{candidate.name}: {why}"
    if tuning.pinned:
        names = ", ".join(tuning.pinned)
        yield "set by the job", f"{names}: never varied; --set engine.NAME=null here and in the runs leaves one open"
    if found.ended != "nothing to try":
        kept = (
            "later runs and `bulkgen plan` go by it where model, device, vLLM, the job's settings and lengths are alike"
        )
        yield "kept", kept if tuning.kept else "no: the state folder (BULKGEN_HOME) cannot be written"
    yield "took", f"{figures.seconds(tuning.took_s)} of {figures.seconds(tuning.budget_s)}"


def verdict(tuning: Tuning) -> str:
    """What is best, in a sentence."""
    found, tuned = tuning.findings, tuning.tuned
    if found.ended == "nothing to try":
        return "the resolved settings: the job leaves nothing open that could matter here"
    if found.best is None:
        return "the resolved settings: they are the best within noise, of what was tried"
    before = ", ".join(f"{name} {value}" for name, value in tuned.instead_of.items())
    return f"{found.best.candidate.name}: {tuned.gain:.0%} faster than {before}, as resolved"


def _aside(standing: Standing, margin: float | None) -> str:
    beyond = margin is not None and standing.gain > margin
    values = ", ".join(f"engine.{name}: {value}" for name, value in standing.candidate.changes)
    use = f"set {values} in the job to have it" if beyond else "within noise, or slower"
    return f"{standing.candidate.name}: {standing.gain:+.1%}; {use}"


def tuning_json(tuning: Tuning) -> dict[str, Any]:
    """All of it, for programs: times in seconds, gains as shares of the resolved settings' speed."""
    found, best = tuning.findings, tuning.findings.best
    return {
        "name": tuning.name,
        "verdict": verdict(tuning),
        "best": None if best is None else {"settings": best.candidate.values, "gain": best.gain},
        "instead_of": dict(tuning.tuned.instead_of),
        "margin": found.margin,
        "ended": found.ended,
        "rounds": [[_trial_json(trial) for trial in trials] for trials in found.rounds],
        "aside": [{"settings": s.candidate.values, "gain": s.gain} for s in found.aside],
        "not_tried": [{"settings": candidate.values, "why": why} for candidate, why in found.not_tried],
        "set_by_the_job": list(tuning.pinned),
        "resolved": [asdict(setting) for setting in tuning.settings],
        "shape": asdict(tuning.tuned.shape),
        "kept": tuning.kept,
        "budget_s": tuning.budget_s,
        "took_s": tuning.took_s,
    }


def _trial_json(trial: Trial) -> dict[str, Any]:
    return {
        "settings": trial.candidate.values,
        "rows": trial.rows,
        "start_s": trial.start_s,
        "generate_s": trial.generate_s,
        "tokens": trial.tokens,
        "tokens_per_s": trial.rate,
        "failed": trial.failed,
        "fault": trial.fault or None,
    }
