"""How a job's engines are set up: on what, with which settings for the rows of its plan, and what each replica gets."""

from collections.abc import Sequence

import numpy as np

from bulkgen.engine import EngineSettings
from bulkgen.engine.devices import Share, divide, gpus_here, runs_on_cpu
from bulkgen.errors import SpecError
from bulkgen.plan import Plan, Workload, measure
from bulkgen.prompt import Model
from bulkgen.seat import ReplicaSetup
from bulkgen.sizing import (
    CPU_BLOCK_SIZES,
    UNMEASURED,
    Architecture,
    Choices,
    Device,
    Place,
    Rows,
    Setting,
    chosen_args,
    chosen_env,
    computes_bfloat16,
    cpu_device,
    find_device,
    resolve,
    serve,
    unknown_gpu,
)
from bulkgen.spec import JobSpec

# Of larger plans prefixes are not counted in each start: it would take seconds.
_MEASURED_ROWS = 200_000


def device_here() -> Device:
    """What this machine's replicas run on: its first GPU if vLLM would use one, else its cores, not measured."""
    if runs_on_cpu():
        return cpu_device(speed=UNMEASURED)
    name, memory_bytes = (gpus_here() or [("GPU", 0)])[0]
    try:
        return find_device(name)
    except SpecError:
        return unknown_gpu(name, memory_bytes)


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


def engine_settings(spec: JobSpec, model: Model, plan: Plan) -> tuple[Setting, ...]:
    """The settings of each replica's engine for the rows of a plan; none for an engine without a model."""
    engine = spec.engine
    if engine.kind != "vllm":
        return ()
    device = device_here()
    workload = None
    if device.kind == "cpu" and engine.block_size is None and plan.rows <= _MEASURED_ROWS:
        workload = measure(plan, spec.sampling.constants(), block_sizes=CPU_BLOCK_SIZES)
    rows = rows_in_numbers(plan, workload)
    choices = Choices(args=engine.vllm_args(), env=engine.environment(), replicas=engine.replicas)
    try:
        return serve(Architecture.of(model.config), rows, device, choices, bfloat16=computes_bfloat16()).settings
    except SpecError:
        # A model that the arithmetic does not know may be one that the engine does.
        place = Place(device=device, bfloat16=computes_bfloat16())
        return resolve(choices.args, rows.demand(), place, model.context_length)


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


def machine_shares(spec: JobSpec) -> list[Share]:
    """What each replica gets of this machine. Raises EngineError where it has too little."""
    engine = spec.engine
    return divide(engine.replicas, engine.vllm_args()) if engine.kind == "vllm" else [Share()] * engine.replicas
