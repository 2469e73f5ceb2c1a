"""An engine's settings as resolved for a job: each with its value, who says so, and why. Pure arithmetic.

What the user set stands as it is. What is computed follows from the rows of the plan, the model's config and the
device. For the rest the engine's own defaults hold, and are named, so that nobody has to look them up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bulkgen.sizing.device import GIB, Device

Source = Literal["user", "measured", "computed", "default"]

# vLLM's defaults for offline use (get_batch_defaults, vllm/engine/arg_utils.py): sequences and tokens of a step.
_CPU_BATCH, _GPU_BATCH, _LARGE_GPU_BATCH = (256, 4096), (256, 8192), (1024, 16384)
_LARGE_GPU_BYTES = 70 * GIB
CPU_BLOCK_SIZES = (128, 32)
# A smaller block pays on the CPU where it lets this share of all prompt tokens more be found in the prefix cache.
_WORTH_A_SMALLER_BLOCK = 0.01
# torch.compile: about a minute on a CPU with a cold cache, then about 20 % faster: it pays from some five minutes on.
_COMPILE_S, _COMPILED_SHARE = 60.0, 0.8
# Lengths that differ a little from one day to the next should not make another engine.
_LENGTH_STEP = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting under its own name: `value` as the engine is given it, or as its default is (`source` default).

    `costs` says what the user's own value costs, where it does. `where` it goes: into the engine's arguments, or into
    the environment of its process.
    """

    name: str
    value: Any
    source: Source
    reason: str
    costs: str = ""
    where: Literal["args", "env"] = "args"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the rows of a plan ask of an engine.

    `longest`: tokens of the longest prompt with its output budget. `sequences`: rows times the answers that each asks
    for. `shared`: by block size, the share (0..1) of prompt tokens that a prefix cache can hold; empty where it was not
    measured. `expected_s`: how long generation should take, None where unknown.
    """

    longest: int
    sequences: int
    shared: Mapping[int, float] = field(default_factory=dict)
    expected_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one replica runs.

    `kv_tokens` is what its KV cache holds and `concurrency` how many sequences of this data set that are at once; None
    where that is not known. `bfloat16`: whether a CPU computes in it. `small_blocks`: whether the model's attention is
    known to run with KV blocks smaller than the default.
    """

    device: Device
    kv_tokens: int | None = None
    concurrency: float | None = None
    small_blocks: bool = False
    bfloat16: bool = True


_Choice = tuple[Source, Any, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What measuring has found: by the settings' names, those of variables too, the best value and in words how.

    `notes`: what to say of settings for which it has found nothing better.
    """

    choices: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Any]:
        """The best values alone."""
        return {name: value for name, (value, _) in self.choices.items()}

    def over(self, name: str, choice: _Choice) -> _Choice:
        """What becomes of a choice that was made without measuring."""
        if name in self.choices:
            return "measured", *self.choices[name]
        source, value, reason = choice
        return source, value, f"{reason}; {self.notes[name]}" if name in self.notes else reason

    def settings(self) -> tuple[Setting, ...]:
        """The best values as settings. A name in capitals is a variable's."""
        return tuple(
            Setting(name=name, value=value, source="measured", reason=reason, where="env" if name.isupper() else "args")
            for name, (value, reason) in self.choices.items()
        )


def resolve(
    given: Mapping[str, Any],
    demand: Demand,
    place: Place,
    model_length: int | None,
    measured: Measured | None = None,
) -> tuple[Setting, ...]:
    """The settings that matter for a job, in the order in which they are shown.

    `given`: what the user set, under vLLM's names. `model_length`: the model's own context, None where unknown.
    """
    on_cpu = place.device.kind == "cpu"
    found = measured or Measured()
    known = {**found.values, **given}

    def settled(name: str, choice: _Choice, costs: str = "") -> Setting:
        return _settled(name, given, found.over(name, choice), costs)

    longest = _max_model_len(demand, model_length)
    settings = [
        length := settled("max_model_len", longest, _longer_than_needed(given.get("max_model_len"), demand)),
        seqs := settled("max_num_seqs", _max_num_seqs(known, demand, place)),
        settled("max_num_batched_tokens", _max_num_batched_tokens(given, place, length.value, seqs.value)),
        settled("block_size", _block_size(demand, place), _lost_prefixes(given.get("block_size"), demand)),
        settled("enable_prefix_caching", _prefix_caching(demand, place), _no_cache(given, demand)),
        settled("enforce_eager", _enforce_eager(demand, place)),
    ]
    if on_cpu:
        settings.append(settled("dtype", _cpu_dtype(place), _slow_dtype(given.get("dtype"), place)))
    else:
        share = "vLLM's default; the rest is left to CUDA and whatever else uses the device"
        settings.append(settled("gpu_memory_utilization", ("default", 0.92, share)))
    kept = "as the model computes; other formats change answers and are never chosen unasked"
    settings.append(settled("kv_cache_dtype", ("default", "auto", kept)))
    named = {setting.name for setting in settings}
    return (*settings, *(s for s in found.settings() if s.name not in named and s.name not in given))


def chosen_args(settings: Sequence[Setting]) -> dict[str, Any]:
    """Arguments that the engine is given: all but its own defaults."""
    return {s.name: s.value for s in settings if s.source != "default" and s.where == "args"}


def chosen_env(settings: Sequence[Setting]) -> dict[str, str]:
    """The same for the environment of its process."""
    return {s.name: str(s.value) for s in settings if s.source != "default" and s.where == "env"}


def _settled(name: str, given: Mapping[str, Any], choice: _Choice, costs: str) -> Setting:
    source, value, reason = choice
    if given.get(name) is None:
        return Setting(name=name, value=value, source=source, reason=reason)
    if given[name] == value:
        return Setting(name=name, value=value, source="user", reason=reason)
    other = f"would be {value} otherwise: {reason}"
    return Setting(name=name, value=given[name], source="user", reason=other, costs=costs)


def _max_model_len(demand: Demand, model_length: int | None) -> _Choice:
    need = -(-demand.longest // _LENGTH_STEP) * _LENGTH_STEP
    if model_length is not None and model_length <= need:
        return "default", model_length, f"the model's own; the longest row needs {demand.longest:,}"
    own = "" if model_length is None else f"; the model could hold {model_length:,}"
    return "computed", need, f"the longest row needs {demand.longest:,}{own}"


def _longer_than_needed(wanted: int | None, demand: Demand) -> str:
    if wanted is None or wanted <= 2 * demand.longest:
        return ""
    return "the engine must find room for one sequence of this length before it starts"


def _batch_defaults(place: Place) -> tuple[int, int]:
    if place.device.kind == "cpu":
        return _CPU_BATCH
    large = place.device.memory_bytes >= _LARGE_GPU_BYTES and not place.device.name.startswith("a100")
    return _LARGE_GPU_BATCH if large else _GPU_BATCH


def _max_num_seqs(given: Mapping[str, Any], demand: Demand, place: Place) -> _Choice:
    usual, _ = _batch_defaults(place)
    batched = given.get("max_num_batched_tokens")
    if batched is not None and batched < min(usual, demand.sequences):
        return "computed", batched, "no more than max_num_batched_tokens, since each takes one of a step"
    if demand.sequences <= usual:
        few = max(1, demand.sequences)
        return "computed", few, f"there are {few:,} sequences in all"
    if place.kv_tokens is None or place.concurrency is None:
        return "default", usual, "vLLM's default for offline use on such a device"
    fit = max(1, int(place.concurrency))
    holds = f"the KV cache of {place.kv_tokens:,} tokens holds about {fit:,} rows of this data set at once"
    if fit > usual and place.device.kind == "gpu":
        # A decode step costs little more with more sequences as long as reading the weights bounds it.
        most = min(4 * usual, -(-fit // 64) * 64, demand.sequences, batched or _batch_defaults(place)[1])
        return "computed", most, f"{holds}, vLLM's default of {usual:,} would leave it empty in part"
    return "default", usual, f"vLLM's default for offline use on such a device; {holds}"


def _max_num_batched_tokens(given: Mapping[str, Any], place: Place, length: int, seqs: int) -> _Choice:
    _, usual = _batch_defaults(place)
    why = "vLLM's default for offline use on such a device"
    if given.get("enable_chunked_prefill") is False:
        return "default", max(usual, length), f"{why}, and a whole prompt without chunked prefill"
    if seqs * length < usual:
        return (
            "default",
            max(seqs, seqs * length),
            f"vLLM's default: {seqs:,} sequences of {length:,} tokens",
        )
    return "default", usual, why


def _block_size(demand: Demand, place: Place) -> _Choice:
    if place.device.kind != "cpu":
        return "default", 16, "vLLM's default on GPUs"
    large, small = CPU_BLOCK_SIZES
    if not place.small_blocks or not {large, small} <= demand.shared.keys():
        return "default", large, "vLLM's default on CPUs"
    with_large, with_small = demand.shared[large], demand.shared[small]
    shares = (
        f"the prefix cache can hold {with_small:.0%} of the prompt tokens with {small}, {with_large:.0%} with {large}"
    )
    if with_small - with_large >= _WORTH_A_SMALLER_BLOCK:
        return "computed", small, shares
    return "default", large, f"vLLM's default on CPUs; {shares}"


def _lost_prefixes(wanted: int | None, demand: Demand) -> str:
    if wanted is None or wanted not in demand.shared:
        return ""
    lost = max(demand.shared.values()) - demand.shared[wanted]
    return f"{lost:.0%} of the prompt tokens are computed again and again" if lost >= _WORTH_A_SMALLER_BLOCK else ""


def _prefix_caching(demand: Demand, place: Place) -> _Choice:
    most = max(demand.shared.values(), default=None)
    if most is None:
        return "default", True, "vLLM's default"
    return "default", True, f"up to {most:.0%} of the prompt tokens stand at the beginning of an earlier prompt too"


def _no_cache(given: Mapping[str, Any], demand: Demand) -> str:
    most = max(demand.shared.values(), default=0.0)
    if given.get("enable_prefix_caching") is not False or most < _WORTH_A_SMALLER_BLOCK:
        return ""
    return f"{most:.0%} of the prompt tokens are computed again and again"


def _enforce_eager(demand: Demand, place: Place) -> _Choice:
    if place.device.kind != "cpu":
        return "default", False, "CUDA graphs save host time at every step"
    pays_from_s = _COMPILE_S / (1 - _COMPILED_SHARE)
    pays = f"torch.compile takes about {_COMPILE_S:.0f} s here and then saves about {1 - _COMPILED_SHARE:.0%}"
    if demand.expected_s is None:
        return "computed", True, f"{pays}; how long this job takes is not known yet"
    if demand.expected_s >= pays_from_s:
        return "computed", False, f"{pays}, of about {demand.expected_s:,.0f} s"
    return "computed", True, f"{pays}, of about {demand.expected_s:,.0f} s: not worth it below {pays_from_s:,.0f} s"


def _cpu_dtype(place: Place) -> _Choice:
    if place.bfloat16:
        return "default", "auto", "the model's own, which this processor computes"
    return "computed", "float32", "this processor has no instructions for bfloat16, which takes several times as long"


def _slow_dtype(wanted: str | None, place: Place) -> str:
    if place.bfloat16 or wanted not in ("bfloat16", "float16", "auto"):
        return ""
    return "several times the time: this processor has no instructions for it"
