"""How a job's engines are set up: on what, with which settings for the rows of its plan, and what each replica gets."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from bulkgen.engine import EngineSettings
from bulkgen.engine.devices import Share, divide, gpus_here, runs_on_cpu, vllm_version
from bulkgen.errors import SpecError
from bulkgen.plan import BLOCK_SIZES, Plan, Workload, measure
from bulkgen.profiles import Profile, Tuned, WorkShape, cpu_speed, load_profile, load_tuned, nearest
from bulkgen.prompt import Model
from bulkgen.replica import Work
from bulkgen.rundir import RunDir
from bulkgen.seat import ReplicaSetup
from bulkgen.sizing import (
    Architecture,
    Choices,
    Device,
    Measured,
    Place,
    Rows,
    Serving,
    Setting,
    chosen_args,
    chosen_env,
    computes_bfloat16,
    cpu_device,
    find_device,
    processor_name,
    resolve,
    serve,
    unknown_gpu,
)
from bulkgen.spec import JobSpec

# Variables that say something about an engine, and are the user's wherever they were set.
_SPACE = "VLLM_CPU_KVCACHE_SPACE"
_OWN_VARIABLES = (_SPACE, "VLLM_ALLOW_LONG_MAX_MODEL_LEN")


def device_here() -> Device:
    """What this machine's replicas run on: its first GPU if vLLM would use one, else its cores."""
    if runs_on_cpu():
        return cpu_here()
    name, memory_bytes = (gpus_here() or [("GPU", 0)])[0]
    try:
        return find_device(name)
    except SpecError:
        return unknown_gpu(name, memory_bytes)


def cpu_here() -> Device:
    """This machine's cores, as fast as they were ever measured."""
    return cpu_device(speed=cpu_speed())


def rows_in_numbers(plan: Plan, workload: Workload | None, expected_output: int | None = None) -> Rows:
    """A plan's rows as far as engine settings depend on them; without a workload nothing is known of prefixes."""
    prompt, budget = plan.lengths()
    prefixes = () if workload is None else workload.prefixes
    return Rows(
        prompt=prompt,
        output=budget if expected_output is None else np.minimum(budget, expected_output),
        budget=budget,
        answers=len(prompt) if workload is None else workload.answers,
        shared={share.block_size: share.hit_tokens for share in prefixes},
        resident={share.block_size: share.shared_tokens for share in prefixes},
    )


@dataclass(frozen=True, slots=True)
class Fit:
    """Engine settings that fit the rows of a plan. `serving` and `key` are None where the model is unknown, and `note`
    says why.

    `serving`: what is expected of the run. `key`: under what to look for how long steps take, and to keep it.
    """

    settings: tuple[Setting, ...] = ()
    serving: Serving | None = None
    key: Mapping[str, Any] | None = None
    note: str = ""


def fit_engine(spec: JobSpec, model: Model, plan: Plan) -> Fit:
    """The settings of each replica's engine for the rows of a plan.

    The stub, which has no model, gets none but those that `bulkgen tune` has found for it.
    """
    if spec.engine.kind == "vllm":
        return fit_rows(spec, model, measured_rows(spec, plan), device_here())
    found = load_tuned(tuned_key(spec, model))
    return Fit(_best(found, measured_rows(spec, plan)).settings()) if found else Fit()


def measured_rows(spec: JobSpec, plan: Plan) -> Rows:
    """The rows of a plan in numbers, with what they share."""
    return rows_in_numbers(plan, measure(plan, spec.sampling.constants(), block_sizes=block_sizes(spec)))


def fit_rows(spec: JobSpec, model: Model, rows: Rows, device: Device, measured: Measured | None = None) -> Fit:
    """As `fit`; for a model that is not known, what can be said without it."""
    best = _found_best(spec, model, rows, device) if measured is None else measured
    try:
        return fit(spec, model, rows, device, best)
    except Exception as e:
        # What the arithmetic does not know may be known to the engine; nobody's job should end for advice.
        place = Place(device=device, bfloat16=computes_bfloat16())
        settings = resolve(spec.engine.vllm_args(), rows.demand(), place, model.context_length, best)
        reason = str(e) if isinstance(e, SpecError) else f"{type(e).__name__}: {e}"
        return Fit(settings, note=f"nothing is known of this model's KV cache ({reason}); vLLM decides by itself")


def fit(spec: JobSpec, model: Model, rows: Rows, device: Device, measured: Measured | None = None) -> Fit:
    """As `fit_engine`, for rows in numbers, on any device.

    `measured`: what is known to be best; without it, what `bulkgen tune` has kept for such rows. Raises SpecError for
    what vLLM would refuse, and for a model that is not known.
    """
    engine = spec.engine
    choices = Choices(
        args=engine.vllm_args(),
        env=engine_environment(spec),
        replicas=engine.replicas,
        measured=_found_best(spec, model, rows, device) if measured is None else measured,
    )

    def served(profile: Profile | None) -> tuple[Serving, dict[str, Any]]:
        serving = serve(
            Architecture.of(model.config),
            rows,
            device,
            choices,
            bfloat16=computes_bfloat16(),
            step_model=None if profile is None else profile.steps,
            model_length=model.context_length,
        )
        return serving, _profile_key(model, device, choices, serving)

    serving, key = served(None)
    if (profile := load_profile(key)) is not None:
        serving, key = served(profile)
    return Fit(serving.settings, serving, key)


def _found_best(spec: JobSpec, model: Model, rows: Rows, device: Device) -> Measured:
    """What `bulkgen tune` has kept for rows like these."""
    return _best(load_tuned(tuned_key(spec, model, device)), rows)


def _best(found: Sequence[Tuned], rows: Rows) -> Measured:
    tuned = nearest(found, WorkShape.of(rows))
    return Measured() if tuned is None else tuned.measured()


def tuned_key(spec: JobSpec, model: Model, device: Device | None = None) -> dict[str, Any]:
    """What the best settings depend on besides the shape of the data set; `device` is for vLLM alone.

    The user's own settings are in it, since what is best for the others depends on them.
    """
    own = json.dumps([spec.engine.vllm_args(), engine_environment(spec)], sort_keys=True)
    on_cpu = device is not None and device.kind == "cpu"
    return {
        "what": "best settings",
        "model": model.fingerprint,
        "device": device.name if device is not None and spec.engine.kind == "vllm" else spec.engine.kind,
        "processor": processor_name() if on_cpu and spec.engine.kind == "vllm" else "",
        "vllm": vllm_version(),
        "replicas": spec.engine.replicas,
        "own settings": blake2b(own.encode(errors="surrogatepass"), digest_size=8).hexdigest(),
    }


def engine_environment(spec: JobSpec) -> dict[str, str]:
    """What the engine's environment says of its settings, wherever it was set. Raises SpecError for what cannot be."""
    own = {name: os.environ[name] for name in _OWN_VARIABLES if os.environ.get(name)} | spec.engine.environment()
    space = own.get(_SPACE)
    if space is not None and (not space.strip().isdigit() or int(space) < 1):
        raise SpecError(f"{_SPACE}: must be a number of whole GiB, 1 or more, not {space!r}")
    return own


def block_sizes(spec: JobSpec) -> tuple[int, ...]:
    """Sizes of KV blocks for which common prefixes are counted: those that engines use, and the spec's own."""
    own = spec.engine.block_size
    return BLOCK_SIZES if own is None or own in BLOCK_SIZES else (*BLOCK_SIZES, own)


def _profile_key(model: Model, device: Device, choices: Choices, serving: Serving) -> dict[str, Any]:
    """What the time of a step depends on, but for what is in the step."""
    values = {setting.name: setting.value for setting in serving.settings}
    return {
        "model": model.fingerprint.partition(":")[2],
        "device": device.name,
        "processor": processor_name() if device.kind == "cpu" else "",
        "vllm": vllm_version(),
        "dtype": values.get("dtype") or choices.args.get("dtype") or "auto",
        "enforce_eager": values["enforce_eager"],
        "quantization": choices.args.get("quantization"),
        "tensor_parallel_size": choices.args.get("tensor_parallel_size") or 1,
        "replicas": choices.replicas if device.kind == "cpu" else 1,
    }


def replica_setups(
    spec: JobSpec, shares: Sequence[Share], settings: Sequence[Setting], model: Model, max_model_len: int
) -> list[ReplicaSetup]:
    """Engine settings and share of the machine, replica by replica. What the spec says wins."""
    engine = spec.engine
    args = {"max_model_len": max_model_len} | chosen_args(settings) | engine.vllm_args()
    env = chosen_env(settings) | engine.environment()
    stub = engine.stub.model_dump() if engine.kind == "stub" else {}
    return [
        ReplicaSetup(
            settings=EngineSettings(
                kind=engine.kind,
                model=str(model.path),
                revision=spec.revision,
                args={**share.args, **args},
                stub=stub,
            ),
            env={**share.env, **env},
            cores=share.cores,
        )
        for share in shares
    ]


def work_of(spec: JobSpec, run: RunDir, start: int, settings_key: str) -> Callable[[int, int, ReplicaSetup], Work]:
    """What a replica, in an incarnation and with its setup, is told to do in a start of a run."""

    def work(replica: int, incarnation: int, setup: ReplicaSetup) -> Work:
        return Work(
            plan=str(run.plan),
            parts=str(run.parts),
            start=start,
            replica=replica,
            replicas=spec.engine.replicas,
            incarnation=incarnation,
            settings=setup.settings.to_json() | {"incarnation": incarnation},
            cores=setup.cores,
            sampling=spec.sampling.constants(),
            settings_key=settings_key,
            max_attempts=spec.engine.max_attempts,
            row_timeout_s=spec.engine.row_timeout_s,
            commit_rows=spec.output.commit_rows,
            commit_s=spec.output.commit_s,
        )

    return work


def machine_shares(spec: JobSpec) -> list[Share]:
    """What each replica gets of this machine.

    Raises EngineError where it has too little, SpecError where the engine's environment says what cannot be.
    """
    engine = spec.engine
    if engine.kind == "vllm":
        engine_environment(spec)
    return divide(engine.replicas, engine.vllm_args()) if engine.kind == "vllm" else [Share()] * engine.replicas
