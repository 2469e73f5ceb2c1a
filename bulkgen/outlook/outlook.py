"""`bulkgen plan`: what a job will be like, before any engine: rows, shape, KV cache, settings, time and cost.

The rows are read, rendered and counted as a run does it, into a plan that is thrown away.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bulkgen.engine_setup import (
    block_sizes,
    cpu_here,
    device_here,
    engine_environment,
    fit,
    machine_shares,
    rows_in_numbers,
)
from bulkgen.errors import EngineError, SpecError
from bulkgen.known import KnownAnswers
from bulkgen.plan import Phases, Plan, Workload, measure
from bulkgen.preparation import check_output, open_data, open_job_model, plan_aside, refuse_empty
from bulkgen.prompt import Model
from bulkgen.rundir import RunDir
from bulkgen.sizing import Device, Range, Rows, Serving, find_device
from bulkgen.spec import JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is known of a job beforehand. `servings`: one for each device; `unknown` says why there is none.

    `reused`: rows that have an answer in the cache or an earlier output.

    `expected_output`: tokens an answer is expected to have, as the user said; None: the budget counts.
    """

    name: str
    model: str
    refused: int
    reused: int
    workload: Workload
    expected_output: int | None
    servings: tuple[Serving, ...]
    unknown: str
    usd_per_hour: float | None

    def phases(self, serving: Serving | None) -> Phases:
        """Prefill against decode, with the prefix cache of a device or with none."""
        size = None if serving is None or not serving.cached_tokens else serving.cache.block_size
        known = {share.block_size for share in self.workload.prefixes}
        return self.workload.phases(size if size in known else None)

    def cost_usd(self, serving: Serving) -> Range | None:
        """What generation costs on all replicas, engine start left out; None without a price."""
        if self.usd_per_hour is None:
            return None
        hourly = self.usd_per_hour * serving.replicas / 3600
        return Range(*(hourly * s for s in (serving.seconds.low, serving.seconds.expected, serving.seconds.high)))


def look_ahead(
    spec: JobSpec,
    devices: Sequence[str],
    expected_output: int | None,
    say: Callable[[str], None],
    show: Callable[[int, int], None],
    check_stop: Callable[[], None] = lambda: None,
) -> Outlook:
    """Plan a job and work out what it takes on each of `devices`, by name; without any on what this machine has.

    Raises what a run would raise for a job or an input that cannot work, and SpecError for an unknown device.
    """
    engine_environment(spec)  # what is wrong there is wrong on every device
    places = [_device(name) for name in devices] or [device_here()]
    dataset, model = open_data(spec), open_job_model(spec, say)
    check_output(spec, RunDir.of_output(spec.output_path))
    known = KnownAnswers(spec, say)
    known.check()
    with tempfile.TemporaryDirectory(prefix="bulkgen-plan-") as folder:
        plan = plan_aside(spec, dataset, model, Path(folder), check_stop, show)
        reused = _spare_known(plan, known, check_stop)
        workload = measure(
            plan, spec.sampling.constants(), block_sizes=block_sizes(spec), expected_output=expected_output
        )
        rows = rows_in_numbers(plan, workload, expected_output)
        refused = plan.refused
    refuse_empty(spec, dataset, workload.rows + workload.unsent + refused)
    servings, unknown = _servings(spec, model, rows, places) if workload.rows else ([], "")
    if not devices and servings:
        servings = [replace(servings[0], refusal=_too_little(spec) or servings[0].refusal)]
    return Outlook(
        name=spec.name,
        model=spec.model,
        refused=refused,
        reused=reused,
        workload=workload,
        expected_output=expected_output,
        servings=tuple(servings),
        unknown=unknown,
        usd_per_hour=spec.price.usd_per_hour,
    )


def _spare_known(plan: Plan, known: KnownAnswers, check_stop: Callable[[], None]) -> int:
    """Leave out the rows that have known answers, and count them."""
    reused = 0
    for answered in known.answer(plan, np.empty(0, np.int64), "", check_stop) if known else ():
        plan.spare(answered.ordinals)
        reused += len(answered.ordinals)
    return reused


def _device(name: str) -> Device:
    return cpu_here() if name.strip().lower() == "cpu" else find_device(name)


def _servings(spec: JobSpec, model: Model, rows: Rows, places: Sequence[Device]) -> tuple[list[Serving], str]:
    """One for each device where that can be worked out, and why not for the others."""
    if not model.config:
        return [], f"{model.path}: no model, so nothing is known of its KV cache, time and cost"
    servings: list[Serving] = []
    unknown: list[str] = []
    for place in places:
        try:
            found = fit(spec, model, rows, place).serving
        except SpecError as e:
            unknown.append(f"{place.name}: nothing is known of KV cache, time and cost: {e}")
        except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError) as e:
            unknown.append(f"{place.name}: the model's config.json is not understood ({type(e).__name__}: {e})")
        else:
            servings += [] if found is None else [found]
    return servings, "; ".join(unknown)


def _too_little(spec: JobSpec) -> str | None:
    """Why this machine cannot hold the replicas; None if it can."""
    try:
        machine_shares(spec)
    except EngineError as e:
        return str(e)
    return None
