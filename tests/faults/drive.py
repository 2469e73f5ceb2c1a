"""Runs a schedule: one start after the other, each with its faults, and the checks after each."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from tests.faults.checks import Broken, Ended, Watch, ensure
from tests.faults.rows import Line, write_rows
from tests.faults.schedule import Schedule, Start

_HOOK = Path(__file__).with_name("hook")
_LIMIT_S = 60.0
_GONE_S = 10.0


@dataclass
class Result:
    """What happened: exit codes of the starts, names of the faults that struck, and what was broken if anything was."""

    seed: int
    codes: list[int] = field(default_factory=list)
    fired: list[str] = field(default_factory=list)
    broken: str | None = None
    wall_s: float = 0.0


def run_schedule(schedule: Schedule, folder: Path, say: Callable[[str], None]) -> Result:
    """Run a schedule in an empty folder. What is broken is in the result, not raised."""
    began = time.monotonic()
    result = Result(schedule.seed)
    try:
        _Run(schedule, folder, say, result).go()
    except Broken as e:
        result.broken = f"start {len(result.codes)}: {e}"
    result.wall_s = time.monotonic() - began
    return result


class _Run:
    def __init__(self, schedule: Schedule, folder: Path, say: Callable[[str], None], result: Result) -> None:
        self._schedule = schedule
        self._folder = folder / "job"
        self._journals = folder / "journals"
        self._say = say
        self._result = result
        self._lines: Sequence[Line] = schedule.lines
        self._watch = Watch(schedule, self._folder)
        self._foreign: dict[Path, bytes] = {}

    def go(self) -> None:
        self._folder.mkdir(parents=True)
        (self._folder / "job.yaml").write_text(yaml.safe_dump(self._schedule.spec), encoding="utf-8")
        self._write_input()
        self._say(f"job: {json.dumps(self._schedule.spec)}")
        for number, start in enumerate(self._schedule.starts):
            self._prepare(start)
            for planned in (*start.faults, *(f"{name}: {value}" for name, value in start.sets.items())):
                self._say(f"start {number}: planned {planned}")
            ended = self._start(number, start)
            self._result.codes.append(ended.code)
            self._result.fired += [_name(f) for f in ended.fired] + [
                f"engine: {name.removeprefix('engine.stub.')}" for name in start.sets if "stub" in name
            ]
            for fired in ended.fired:
                self._say(f"start {number}: struck {fired['role']}: {fired['kind']} at {fired['op']} {fired['path']}")
            self._say(f"start {number}: exit {ended.code} after {ended.wall_s:.1f} s {ended.err.strip()}")
            self._say(f"start {number}: checked {', '.join(self._watch.after(ended, self._lines))}")
            for path, data in self._foreign.items():
                ensure(path.exists() and path.read_bytes() == data, f"{path.name} is another's, and was touched")
        ensure(self._result.codes[-1] in (0, 3), f"the last start ended with {self._result.codes[-1]}: {ended.err}")

    def _write_input(self) -> None:
        write_rows(self._folder / self._schedule.input_name, self._lines, self._schedule.group_rows)

    # ---- one start ----

    def _start(self, number: int, start: Start) -> Ended:
        journal = self._journals / str(number)
        journal.mkdir(parents=True)
        plan = {"root": str(self._folder), "journal": str(journal), "faults": [asdict(f) for f in start.faults]}
        place = journal / "plan.json"
        place.write_text(json.dumps(plan))
        sets = [arg for name, value in start.sets.items() for arg in ("--set", f"{name}={value}")]
        paths = [str(_HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
        began = time.time()
        process = subprocess.Popen(
            [sys.executable, "-m", "bulkgen", "run", "-q", "job.yaml", *sets],
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "BULKGEN_TEST_FAULTS": str(place)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=_LIMIT_S)
            ended_at = time.time()
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            raise Broken(f"not ended after {_LIMIT_S:.0f} s: {err.decode(errors='replace')}") from None
        finally:
            self._expect_none_left(place)
        wall_s = ended_at - began
        ensure(not out, f"-q and yet it said: {out.decode(errors='replace')}")
        fired = [{**asdict(start.faults[note["fault"]]), **note} for note in _notes(journal / "fired.jsonl")]
        if any(f["kind"] == "power" for f in fired):
            self._lose_power(_notes(journal / "disk.jsonl"))
        return Ended(process.returncode, err.decode(errors="replace"), fired, start.sets, wall_s, ended_at)

    def _expect_none_left(self, place: Path) -> None:
        """No process of this start is left; one that is gets killed, lest it trouble others."""
        mark = f"BULKGEN_TEST_FAULTS={place}".encode()
        until = time.monotonic() + _GONE_S
        while left := [p for p in Path("/proc").glob("[0-9]*") if mark in _environment(p)]:
            if time.monotonic() > until:
                for p in left:
                    os.kill(int(p.name), signal.SIGKILL)
                raise Broken(f"processes are left: {', '.join(p.name for p in left)}")
            time.sleep(0.01)

    def _lose_power(self, notes: Sequence[dict[str, Any]]) -> None:
        """Let the disk be as after a power cut: what was not synced is gone, new names among it."""
        dirty: dict[str, int] = {}
        renamed: list[tuple[str, str]] = []
        for note in notes:
            path = note["path"]
            if note["do"] == "dirty":
                dirty.setdefault(path, note["size"])
            elif note["do"] == "synced":
                dirty.pop(path, None)
                renamed = [(old, new) for old, new in renamed if os.path.dirname(new) != path]  # noqa: PTH120
            else:
                dirty = {note["new"] if p == path else p: size for p, size in dirty.items()}
                if not note["replaced"]:
                    renamed.append((path, note["new"]))
        for name, size in dirty.items():
            if Path(name).is_file() and Path(name).stat().st_size > size:
                os.truncate(name, size)
                self._say(f"power: {Path(name).name} was cut to {size} bytes")
        for old, new in reversed(renamed):
            if Path(new).exists() and not Path(old).exists():
                Path(new).rename(old)
                self._say(f"power: {Path(new).name} is {Path(old).name} again")

    # ---- between starts ----

    def _prepare(self, start: Start) -> None:
        for mischief in start.mischief:
            self._say(f"before it: {mischief}")
        if start.lines is not None:
            self._lines = start.lines
            self._write_input()
        if self._watch.run.exists():
            for mischief in start.mischief:
                self._do(mischief)
        self._watch.forget_output()

    def _do(self, mischief: str) -> None:
        manifest = self._watch.run / "manifest.jsonl"
        match mischief:
            case "torn record" if manifest.exists():
                _append(manifest, b'{"record":"part","start":1,"name":"part-s0001-r0-i0-0000')
            case "zeros behind the manifest" if manifest.exists():
                _append(manifest, bytes(40))
            case "leftover temporaries":
                self._leave_temporaries(self._watch.run, self._watch.output)
            case "foreign file" if manifest.exists():
                self._add_foreign(self._watch.run, self._watch.output)
            case "output removed" | "output cut" | "failures removed":
                self._damage(mischief)

    def _damage(self, mischief: str) -> None:
        if mischief == "failures removed":
            (self._watch.run / "failures.parquet").unlink(missing_ok=True)
        for path in self._output_files():
            if mischief == "output removed":
                path.unlink()
            elif mischief == "output cut" and self._watch.output.suffix:  # in a folder it counts as another's
                os.truncate(path, path.stat().st_size // 2)

    def _output_files(self) -> list[Path]:
        output = self._watch.output
        files = [output] if output.suffix else sorted(output.glob("part-*.parquet"))
        return [file for file in files if file.is_file()]

    def _leave_temporaries(self, run: Path, output: Path) -> None:
        """As a crash would, each by a name that bulkgen gives."""
        (run / "parts").mkdir(exist_ok=True)
        beside = output.parent / ".tmp-out.parquet" if output.suffix else output / ".tmp-part-00000.parquet"
        for path in (run / "parts" / ".tmp-part-s0001-r0-i0-000000.parquet", run / ".tmp-failures.parquet", beside):
            path.write_bytes(b"PAR1 half")
        pq.write_table(pa.table({"a": [1]}), run / "parts" / "part-s0001-r7-i0-000000.parquet")
        shutil.rmtree(run / ".tmp-plan", ignore_errors=True)
        (run / ".tmp-plan").mkdir()
        (run / ".tmp-plan" / "keys.bin").write_bytes(b"half")

    def _add_foreign(self, run: Path, output: Path) -> None:
        places = [run / "foreign.parquet", run / "parts" / "foreign-notes.txt", run / "parts" / "foreign.parquet"]
        if not output.suffix:
            places += [output / "foreign.parquet", output / "README-foreign.md"]
        for place in places:
            place.parent.mkdir(exist_ok=True)
            place.write_bytes(b"precious")
            self._foreign[place] = b"precious"


def _name(fired: dict[str, Any]) -> str:
    role = "driver" if fired["role"] == "driver" else "replica"
    kind = f"{fired['kind']}{' (lasting)' if fired['lasting'] else ''}"
    return f"{role}: {kind}"


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as f:
        f.write(data)


def _notes(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _environment(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""
