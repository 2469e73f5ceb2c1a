"""Which engine settings are worth a try: those that the user has left open, and that can matter here. Pure arithmetic.

A candidate changes one setting, or a few together once each of them has shown to be faster.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from bulkgen.sizing import Setting

THREADS = "OMP_NUM_THREADS"
# Settings that change answers, and the values that are worth a try on a device.
ANSWERS_CHANGE: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "kv_cache_dtype": {"cpu": ("fp8",), "gpu": ("fp8",)},
    "quantization": {"gpu": ("fp8",)},
}
# Blocks of KV cache that attention kernels take (see sizing/kv_groups.py), and that are not too many to keep.
_BLOCKS: Mapping[str, tuple[int, ...]] = {"cpu": (32, 64, 128), "gpu": (16, 32)}
# torch.compile with a cold cache takes longer to start than without it: 90 to 110 s against 20 to 33 s, on two cores.
_COMPILE_S = 80.0
# vLLM's tokens of a step should not be fewer than this: a prefill would take a step for every few tokens.
_LEAST_BATCHED = 512


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings to try in place of the resolved ones; none: those themselves.

    `least_rows`: a smaller sample would not fill what is changed. `extra_start_s`: how much longer its engine may take
    to start, seconds. `answers_change`: it changes what the engine answers, not only how fast.
    """

    changes: tuple[tuple[str, Any], ...] = ()
    least_rows: int = 0
    extra_start_s: float = 0.0
    answers_change: bool = False

    @property
    def values(self) -> dict[str, Any]:
        """What is changed, by name."""
        return dict(self.changes)

    @property
    def name(self) -> str:
        """For people."""
        return ", ".join(f"{name} {value}" for name, value in self.changes) or "resolved settings"


RESOLVED = Candidate()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What candidates depend on, of one replica of `replicas`.

    `sequences` of the data set and `prompt_tokens` in all; `running`: how many sequences run at once, as settings are
    resolved. `small_blocks`: whether the model's attention takes KV blocks of any size. `cores`: that it computes on,
    and `physical_cores` of them, where several share one; 0 where threads are not its own.
    """

    device: Literal["cpu", "gpu"]
    sequences: int
    running: int
    prompt_tokens: int
    small_blocks: bool
    replicas: int = 1
    whole_prompts: bool = False
    cores: int = 0
    physical_cores: int = 0


def propose(
    settings: Sequence[Setting], given: Collection[str], ground: Ground, allowed: Collection[str]
) -> list[Candidate]:
    """Candidates, the most promising first. What is in `given` was set by the user and is never varied.

    `allowed`: settings of ANSWERS_CHANGE that the user lets vary; without it none of them does.
    """
    values = {setting.name: setting.value for setting in settings}
    pinned = {*given, *(setting.name for setting in settings if setting.source == "user")}
    found = [*_compile(values, ground), *_batched(values, ground), *_sequences(values, ground)]
    found += [*_blocks(values, ground), *_threads(ground)]
    found += [
        Candidate(((name, value),), answers_change=True)
        for name in ANSWERS_CHANGE
        if name in allowed
        for value in ANSWERS_CHANGE[name].get(ground.device, ())
        if value != values.get(name)
    ]
    return [candidate for candidate in found if not pinned & candidate.values.keys()]


def pinned_names(settings: Sequence[Setting], given: Collection[str], ground: Ground) -> list[str]:
    """Settings that could be varied here, but for the user's own values."""
    open_ones = [replace(setting, source="computed") for setting in settings]
    could = {name for candidate in propose(open_ones, (), ground, ()) for name in candidate.values}
    own = {*given, *(setting.name for setting in settings if setting.source == "user")}
    return sorted(could & own)


def together(changes: Sequence[Candidate]) -> Candidate | None:
    """The changes of several candidates at once, of a setting the first; None for fewer than two."""
    values: dict[str, Any] = {}
    used: list[Candidate] = []
    for candidate in changes:
        if not values.keys() & candidate.values.keys():
            values |= candidate.values
            used.append(candidate)
    if len(used) < 2:
        return None
    return Candidate(
        tuple(values.items()),
        least_rows=max(candidate.least_rows for candidate in used),
        extra_start_s=max(candidate.extra_start_s for candidate in used),
    )


def _compile(values: Mapping[str, Any], ground: Ground) -> Iterator[Candidate]:
    eager = values.get("enforce_eager")
    if eager is not None:
        extra_s = _COMPILE_S if eager and ground.device == "cpu" else 0.0
        yield Candidate((("enforce_eager", not eager),), extra_start_s=extra_s)


def _batched(values: Mapping[str, Any], ground: Ground) -> Iterator[Candidate]:
    """Tokens of a step: twice as many where a step could have them, and half."""
    now = int(values["max_num_batched_tokens"])
    least = max(
        _LEAST_BATCHED, int(values["max_num_seqs"]), int(values["max_model_len"]) if ground.whole_prompts else 0
    )
    row_tokens = ground.prompt_tokens / ground.sequences
    for value in (2 * now, now // 2):
        # Prompts that are no more tokens than the smaller of both are prefilled in one step with either.
        differs = min(value, now)
        if value >= least and ground.prompt_tokens > differs:
            rows = int(differs / row_tokens) + 1
            yield Candidate((("max_num_batched_tokens", value),), least_rows=rows * ground.replicas)


def _sequences(values: Mapping[str, Any], ground: Ground) -> Iterator[Candidate]:
    """Sequences at once: more only where nothing else bounds them, fewer than there would be."""
    now = int(values["max_num_seqs"])
    more = min(2 * now, ground.sequences)
    if ground.running >= now and more > now and more <= int(values["max_num_batched_tokens"]):
        yield Candidate((("max_num_seqs", more),), least_rows=more * ground.replicas)
    for fewer in (ground.running // 2, ground.running // 4):
        if fewer >= 1:
            yield Candidate((("max_num_seqs", fewer),), least_rows=ground.running * ground.replicas)


def _blocks(values: Mapping[str, Any], ground: Ground) -> Iterator[Candidate]:
    if ground.small_blocks:
        sizes = [size for size in _BLOCKS[ground.device] if size != values["block_size"]]
        yield from (Candidate((("block_size", size),)) for size in sizes)


def _threads(ground: Ground) -> Iterator[Candidate]:
    """One thread a physical core, and a core left to the rest of the process where there are many."""
    numbers = {ground.physical_cores} | ({ground.cores - 1} if ground.cores >= 4 else set())
    for number in sorted(numbers, reverse=True):
        if 0 < number < ground.cores:
            yield Candidate(((THREADS, number),))
