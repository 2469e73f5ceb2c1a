"""A schedule: all that a seed decides, as plain data. Rows, job, and for each start what happens before and in it."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.faults.reference import Rules
from tests.faults.rows import POISON, STUCK, Line, change_rows, make_rows

KILLS = ("kill", "power")
SIGNALS = ("term", "int", "hup")
ERRORS = ("ENOSPC", "EIO", "EACCES", "EDQUOT")
# How often each operation occurs in a plain run of this size, about: the range that `nth` is drawn from.
_TIMES = {
    "driver": {
        "any": 250,
        "read": 75,
        "open": 40,
        "write": 230,
        "fsync": 42,
        "rename": 12,
        "mkdir": 5,
        "unlink": 7,
        "send": 12,
        "recv": 20,
        "import": 77,
    },
    "replica": {
        "any": 75,
        "read": 15,
        "open": 5,
        "write": 200,
        "fsync": 8,
        "rename": 4,
        "unlink": 4,
        "send": 18,
        "import": 27,
    },
}


@dataclass(frozen=True)
class Fault:
    """One fault inside a process: of which kind, in whom, at the nth operation of which sort.

    `mode`: before the operation, after it, or amid it (torn: half a write). `times`: how many processes of a start it
    may befall. `lasting`: once it has struck, whatever needs room fails until the start ends.
    """

    kind: str
    role: str
    op: str
    nth: int
    mode: str = "before"
    times: int = 1
    lasting: bool = False

    @property
    def name(self) -> str:
        """As it is counted in tables."""
        return f"{self.kind} of {self.role}" if self.kind in ("kill", "delay") else self.kind

    def __str__(self) -> str:
        more = f", {self.times} times" if self.times > 1 else ""
        return f"{self.name}: {self.role}, {self.mode} {self.op} {self.nth}{more}{', lasting' if self.lasting else ''}"


@dataclass(frozen=True)
class Start:
    """One start of the run: what is done to files before it, how its engine errs (`sets`), what befalls processes."""

    mischief: tuple[str, ...] = ()
    lines: tuple[Line, ...] | None = None
    sets: dict[str, Any] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True)
class Schedule:
    """A whole one. The last start has no faults."""

    seed: int
    spec: dict[str, Any]
    rules: Rules
    group_rows: int
    lines: tuple[Line, ...]
    starts: tuple[Start, ...]

    @property
    def input_name(self) -> str:
        return "in.jsonl" if self.rules.jsonl else "in.parquet"


MISCHIEF = (
    "torn record",
    "zeros behind the manifest",
    "leftover temporaries",
    "foreign file",
    "output removed",
    "output cut",
    "failures removed",
    "input changed",
)


def make_schedule(seed: int) -> Schedule:
    """The schedule of a seed."""
    rng = random.Random(seed)
    jsonl, ids, budgets = rng.random() < 0.6, rng.random() < 0.75, rng.random() < 0.3
    number = rng.choice((20, 30, 50, 80, 150))
    lines = make_rows(rng, number, jsonl=jsonl, ids=ids, budgets=budgets, bad=rng.choice((0.0, 0.05, 0.2)))
    spec = _job(rng, jsonl, ids, budgets, number)
    lines = _special_rows(rng, lines, spec)
    rules = _rules(spec, jsonl, budgets)
    starts: list[Start] = []
    now = lines
    for i in range(rng.choices((1, 2, 3, 4), (60, 28, 8, 4))[0] + 1):
        mischief: tuple[str, ...] = ()
        changed = None
        if i and rng.random() < 0.6:
            mischief = tuple(rng.sample(MISCHIEF, rng.choice((1, 1, 2))))
            if "input changed" in mischief:
                what, now = change_rows(rng, now, ids=ids, budgets=budgets)
                mischief = tuple(what if m == "input changed" else m for m in mischief)
                changed = tuple(now)
        starts.append(Start(mischief, changed, *_faults(rng, spec)))
    last = starts[-1]
    starts[-1] = Start(last.mischief, last.lines)
    return Schedule(seed, spec, rules, rng.choice((7, 40, 1000)), tuple(lines), tuple(starts))


def _job(rng: random.Random, jsonl: bool, ids: bool, budgets: bool, number: int) -> dict[str, Any]:
    stub: dict[str, Any] = {
        "seed": rng.randrange(1000),
        "kv_tokens": rng.choice((96, 320, 1 << 20, 1 << 20)),
        "fail_rate": rng.choice((0.0, 0.0, 0.0, 0.1)),
        "shuffle": rng.random() < 0.5,
        "step_s": rng.choice((0.0, 0.0, 0.0005)),
    }
    engine = {
        "kind": "stub",
        "replicas": rng.choice((1, 1, 2)),
        "max_num_seqs": rng.choice((1, 2, 4, 16)),
        "max_model_len": 400,
        "stub": stub,
    }
    output: dict[str, Any] = {"path": rng.choice(("out.parquet", "out/")), "commit_s": rng.choice((0.05, 1.0, 15.0))}
    output |= {"commit_rows": rng.choice((max(1, number // 30), 5, 20, 5000)), "file_rows": rng.choice((9, 40, 1000))}
    shards: dict[str, Any] = {"target_rows": rng.choice((3, 11, 50, "auto"))}
    if rng.random() < 0.3:
        shards["buckets"] = [5, 20, 50]
    return {
        "name": f"faults {number}",
        "model": "stub",
        "input": {"path": "in.jsonl" if jsonl else "in.parquet", "prompt": "prompt", **({"id": "id"} if ids else {})},
        "sampling": {"max_tokens": {"column": "budget"} if budgets else rng.choice((1, 4, 8, 20)), "temperature": 0.5},
        "output": output,
        "engine": engine,
        "shards": shards,
    }


def _rules(spec: dict[str, Any], jsonl: bool, budgets: bool) -> Rules:
    engine = spec["engine"]
    return Rules(
        jsonl=jsonl,
        max_tokens=512 if budgets else spec["sampling"]["max_tokens"],
        budgets=budgets,
        max_model_len=engine["max_model_len"],
        kv_tokens=engine["stub"]["kv_tokens"],
        seed=engine["stub"]["seed"],
        fail_rate=engine["stub"]["fail_rate"],
    )


def _special_rows(rng: random.Random, lines: list[Line], spec: dict[str, Any]) -> list[Line]:
    """Sometimes a row that kills the engine, one that never ends, or answers that come only when asked for again."""
    engine = spec["engine"]
    stub = engine["stub"]
    match rng.choices(("", "poison", "stuck", "flaky"), (75, 8, 8, 9))[0]:
        case "poison":
            stub["poison"] = [POISON]
            engine |= {"max_num_seqs": rng.choice((1, 2)), "replicas": 1}
            return _marked(rng, lines, POISON)
        case "stuck":
            stub["stuck"] = [STUCK]
            # One such row must leave the others a place in the engine, or they wait for ever behind it.
            engine |= {"max_num_seqs": rng.choice((4, 16)), "row_timeout_s": 1.5}
            stub["kv_tokens"] = max(4096, stub["kv_tokens"])
            return _marked(rng, lines, STUCK)
        case "flaky":
            # What a kill interrupts counts as an attempt too.
            stub["flaky_rate"] = 0.3
            engine["max_attempts"] = 20
    return lines


def _marked(rng: random.Random, lines: list[Line], mark: str) -> list[Line]:
    good = [i for i, line in enumerate(lines) if isinstance(line, dict) and line.get("prompt")]
    i = rng.choice(good)
    line = lines[i]
    assert isinstance(line, dict)
    return [*lines[:i], line | {"prompt": f"{mark} {i}"}, *lines[i + 1 :]]


def _faults(rng: random.Random, spec: dict[str, Any]) -> tuple[dict[str, Any], tuple[Fault, ...]]:
    sets: dict[str, Any] = {}
    faults: list[Fault] = []
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        kind = rng.choices(("kill", "power", "signal", "replica", "error", "delay", "engine"), (3, 2, 3, 3, 6, 1, 3))[0]
        if kind == "engine":
            sets |= _engine_fault(rng)
        else:
            faults.append(_MAKERS[kind](rng))
    return sets, tuple(faults)


def _nth(rng: random.Random, role: str, op: str) -> int:
    """Early ones more often, since every run has them."""
    return int(_TIMES[role][op] ** rng.random()) if rng.random() < 0.4 else rng.randint(1, _TIMES[role][op])


def _at(rng: random.Random, kind: str, role: str, ops: tuple[str, ...], modes: tuple[str, ...], **more: Any) -> Fault:
    op = rng.choice(ops)
    mode = rng.choice(modes)
    return Fault(kind, role, op, _nth(rng, role, op), "before" if mode == "torn" and op != "write" else mode, **more)


def _kill(rng: random.Random) -> Fault:
    return _at(rng, "kill", "driver", ("any", "any", "write", "fsync", "rename", "recv"), ("before", "after", "torn"))


def _power(rng: random.Random) -> Fault:
    return _at(rng, "power", "driver", ("any", "fsync", "write", "rename", "recv"), ("before", "after"))


def _signal(rng: random.Random) -> Fault:
    return _at(rng, rng.choice(SIGNALS), "driver", ("any", "any", "any", "recv", "send", "import"), ("before", "after"))


def _replica(rng: random.Random) -> Fault:
    ops = ("any", "any", "write", "fsync", "rename", "send", "import")
    return _at(rng, "kill", "replica", ops, ("before", "after", "torn"), times=rng.choice((1, 1, 2)))


def _error(rng: random.Random) -> Fault:
    kind = rng.choice(ERRORS)
    role = rng.choice(("driver", "driver", "replica"))
    ops: tuple[str, ...] = ("open", "write", "fsync", "rename", "read")
    if kind == "EACCES":
        ops = ("open", "rename", "read", "unlink")
    elif kind in ("ENOSPC", "EDQUOT"):
        ops = ("open", "write", "write", "write", "fsync")
    if role == "driver":
        ops += ("mkdir",)
    lasting = kind in ("ENOSPC", "EDQUOT") and rng.random() < 0.5
    return _at(rng, kind, role, ops, ("before", "before", "torn"), lasting=lasting)


def _delay(rng: random.Random) -> Fault:
    role = rng.choice(("driver", "replica"))
    return _at(rng, "delay", role, ("any", "send"), ("before", "after"))


_MAKERS: dict[str, Callable[[random.Random], Fault]] = {
    "kill": _kill,
    "power": _power,
    "signal": _signal,
    "replica": _replica,
    "error": _error,
    "delay": _delay,
}


def _engine_fault(rng: random.Random) -> dict[str, Any]:
    match rng.choice(("die_at", "hang_at", "die_on_start", "double_rate", "lose_rate", "swap_rate")):
        case "die_at":
            return {"engine.stub.die_at": [rng.randint(1, 40) for _ in range(rng.choice((1, 1, 2)))]}
        case "hang_at":
            return {"engine.stub.hang_at": [rng.randint(1, 40)], "engine.stall_s": 1.0}
        case "die_on_start":
            return {"engine.stub.die_on_start": 1}
        case rate:
            return {f"engine.stub.{rate}": 0.1}
