"""What must be true after every start, whatever befell it, and what after one that finished."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.faults.reference import Expected, expected_rows
from tests.faults.rows import Line
from tests.faults.schedule import ERRORS, KILLS, SIGNALS, Schedule

EXPLAINED = "foreign"  # what the driver of schedules puts into folders bears this in its name
_STOP_S = 10.0
# As Python and shells have it: a signal that comes before bulkgen has begun to listen.
_SIGNALLED = {-1, -2, -15, 130}


class Broken(AssertionError):
    """A promise that was not kept."""


def ensure(true: object, what: str) -> None:
    """An assertion that stays where Python runs with -O, and says what it is about."""
    if not true:
        raise Broken(what)


@dataclass(frozen=True)
class Ended:
    """How a start ended, which faults really struck in it, and in which operations."""

    code: int
    err: str
    fired: Sequence[dict[str, Any]]
    sets: dict[str, Any]
    wall_s: float
    ended_at: float

    def kinds(self, role: str = "") -> set[str]:
        return {f["kind"] for f in self.fired if f["role"].startswith(role)}


@dataclass
class Watch:
    """Looks at a run's folder after each start and remembers what may not change."""

    schedule: Schedule
    folder: Path
    deaths: int = 0
    _manifest: bytes = b""
    _parts: dict[str, str] = field(default_factory=dict)
    _keys: dict[str, list[bytes]] = field(default_factory=dict)
    _output: dict[str, bytes] = field(default_factory=dict)

    @property
    def output(self) -> Path:
        return self.folder / str(self.schedule.spec["output"]["path"])

    @property
    def run(self) -> Path:
        return self.folder / "out.parquet.bulkgen" if self.output.suffix else self.output / "_bulkgen"

    def forget_output(self) -> None:
        """Somebody else has changed the output."""
        self._output = self._outputs()

    # ---- after every start ----

    def after(self, ended: Ended, lines: Sequence[Line]) -> list[str]:
        """Check everything; returns in words what was checked. Raises Broken."""
        self.deaths += sum(f["role"] != "driver" and f["kind"] == "kill" for f in ended.fired)
        replicas = self.schedule.spec["engine"]["replicas"]
        self.deaths += replicas * sum(len(v) if isinstance(v, list) else 1 for v in ended.sets.values())
        rows = expected_rows(lines, self.schedule.rules)
        self._check_exit(ended, rows)
        before = self._manifest.count(b"\n")
        records = self._check_manifest()
        self._check_parts(records)
        self._check_readable()
        self._check_logs()
        checked = ["exit", f"{len(records)} records", f"{len(self._parts)} parts"]
        if ended.code in (0, 3):
            self._check_output(rows)
            self._check_failures(rows)
            self._check_report(rows)
            if len(records) > before and records[-1]["record"] == "end":  # else it had nothing to do
                self._check_temporaries()
            checked.append(f"output of {len(rows)} rows, failures, report")
        else:
            self._check_old_or_new(rows)
            checked.append("output old, new or none")
        self._output = self._outputs()
        return checked

    def _check_exit(self, ended: Ended, rows: Sequence[Expected]) -> None:
        ensure("Traceback" not in ended.err, f"a traceback on standard error: … {ended.err[-600:]}")
        code, driver = ended.code, ended.kinds("driver")
        said = [line for line in ended.err.splitlines() if line]
        if code in (0, 3):
            failed = any(row.status == "failed" for row in rows) or self._poisoned()
            ensure(code == (3 if failed else 0), f"exit {code} where rows failed: {failed}")
            return
        if code == -9:
            ensure(driver & {*KILLS}, "killed, and nobody did it")
            return
        if code in _SIGNALLED:
            sent = [f for f in ended.fired if f["kind"] in SIGNALS]
            ensure(any(_is_early(f) for f in sent), f"exit {code}: a signal that was not handled, or not sent")
            return
        if code == 2:
            ensure(any(f["path"] == "job.yaml" and f["kind"] in ERRORS for f in ended.fired), f"exit 2: {ended.err}")
            return
        why = {4: ended.kinds("replica") | set(ended.sets), 6: {*ERRORS} & ended.kinds(), 75: driver & {*SIGNALS}}
        ensure(code in why, f"exit {code} is not documented, or cannot be here: {ended.err}")
        ensure(why[code], f"exit {code} without a reason: {ended.err}")
        if code == 75 and not said and _asked_twice(ended):
            return
        reasons = [line for line in said if line.startswith("bulkgen: ")]
        ensure(1 <= len(reasons) <= 2 and len(said) <= 3, f"exit {code} must say why in a line or two: {ended.err!r}")
        if code == 75:
            sent_at = min(f["time"] for f in ended.fired if f["kind"] in SIGNALS)
            ensure(ended.ended_at - sent_at < _STOP_S, f"it took {ended.ended_at - sent_at:.1f} s to stop")

    def _check_manifest(self) -> list[dict[str, Any]]:
        path = self.run / "manifest.jsonl"
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        ensure(whole.startswith(self._manifest), "records that were in the manifest are no longer as they were")
        self._manifest = whole
        try:
            records = [json.loads(line) for line in whole.decode().split("\n")[:-1]]
        except ValueError as e:
            raise Broken(f"a damaged record in the manifest: {e}") from e
        for record in records:
            ensure(isinstance(record.get("record"), str), f"a record of no kind: {record}")
        ensure(not records or records[0]["record"] == "format", "the first record must name the format")
        starts = [r["start"] for r in records if r["record"] == "start"]
        ensure(starts == sorted(set(starts)), f"starts are numbered {starts}")
        return records

    def _check_parts(self, records: Sequence[dict[str, Any]]) -> None:
        names = [r["name"] for r in records if r["record"] == "part"]
        ensure(len(names) == len(set(names)), "a part stands twice in the manifest")
        for record in records:
            if record["record"] != "part":
                continue
            name = record["name"]
            path = self.run / "parts" / name
            ensure(path.exists(), f"part {name} is committed and not there")
            data = path.read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            if name not in self._parts:
                table = _read(path)
                ensure(table.num_rows == record["rows"] == record["done"] + record["failed"], f"{name}: rows")
                done = table.column("status").to_pylist().count("done")
                ensure(done == record["done"], f"{name} has {done} rows done, its record says {record['done']}")
                for key in ("output_tokens", "prompt_tokens"):
                    total = sum(n or 0 for n in table.column(key).to_pylist())
                    ensure(total == record[key], f"{name}: {key} are {total}, its record says {record[key]}")
                self._parts[name], self._keys[name] = digest, table.column("key").to_pylist()
            ensure(self._parts[name] == digest, f"part {name} changed after it was committed")
        keys = [key for name in names for key in self._keys[name]]
        ensure(len(keys) == len(set(keys)), "a row was generated again after it was committed")
        counted = 0
        for record in records:
            if record["record"] == "part":
                counted += record["rows"]
            elif record["record"] == "plan":
                planned = record["already_done"] + record["pending"] + record["refused"]
                ensure(planned == record["rows"], f"rows of a plan do not add up: {record}")
                ensure(record["already_done"] <= counted, "a plan counts more rows as done than are committed")

    def _check_readable(self) -> None:
        """What bears a final name is whole."""
        for path in self.folder.rglob("*.parquet"):
            temporary = any(part.startswith(".tmp-") for part in path.relative_to(self.folder).parts)
            if temporary or EXPLAINED in path.name or not path.is_file():
                continue
            if self._output.get(path.name) != path.read_bytes():  # the old one may have been cut
                _read(path)

    def _check_logs(self) -> None:
        """What an engine's log has of tracebacks comes from errors that were put there, or from a driver that died."""
        for path in self.run.glob("engine-*.log"):
            for block in path.read_text(errors="replace").split("Traceback (most recent call last)")[1:]:
                words = [
                    line for line in block.splitlines() if re.match(r"[A-Za-z_.]*(Error|Exception|Interrupt)\b", line)
                ]
                known = words and re.search(r"\[Errno \d+\]", words[0])
                ensure(known, f"{path.name}: {words[0] if words else block[-300:]}")

    def _outputs(self) -> dict[str, bytes]:
        files = [self.output] if self.output.suffix else sorted(self.output.glob("part-*.parquet"))
        return {file.name: file.read_bytes() for file in files if file.is_file()}

    def _check_old_or_new(self, rows: Sequence[Expected]) -> None:
        """The output is that of before, or the new one. In a folder some files may be missing, none is of another."""
        now = self._outputs()
        if all(self._output.get(name) == data for name, data in now.items()):
            ensure(not self.output.suffix or now or not self._output, "the output is gone")
            return
        size = self.schedule.spec["output"]["file_rows"] if not self.output.suffix else len(rows)
        for name in now:
            i = int(re.sub(r"\D", "", name) or 0)
            path = self.output if self.output.suffix else self.output / name
            self._compare(_read(path).to_pylist(), rows[i * size : (i + 1) * size])

    # ---- after one that finished ----

    def _check_output(self, rows: Sequence[Expected]) -> None:
        ensure(self._outputs(), "finished, and there is no output")
        self._compare(self._output_rows(), rows)

    def _output_rows(self) -> list[dict[str, Any]]:
        files = [self.output] if self.output.suffix else sorted(self.output.glob("part-*.parquet"))
        return [row for file in files for row in _read(file).to_pylist()]

    def _compare(self, found: Sequence[dict[str, Any]], rows: Sequence[Expected]) -> None:
        ensure(len(found) == len(rows), f"{len(found)} rows came out, {len(rows)} went in")
        for got, row in zip(found, rows, strict=True):
            where = f"row at {row.position}"
            columns = list(got)[: len(row.columns)]
            ensure(columns == list(row.columns), f"columns are {columns}, they were {list(row.columns)}")
            for name, value in row.columns.items():
                ensure(got[name] == value, f"{where}: {name} was {value!r} and is {got[name]!r}")
            if self._may_be_poison(got):
                continue
            result = (got["status"], got["error_code"], got["text"], got["output_tokens"], got["finish_reason"])
            want = (row.status, row.code, row.text, row.output_tokens, row.finish_reason)
            ensure(result == want, f"{where}: is {result}, should be {want} ({got['error']})")
            if row.prompt_tokens is not None:
                ensure(got["prompt_tokens"] == row.prompt_tokens, f"{where}: {got['prompt_tokens']} prompt tokens")
            ensure(row.code is None or got["error"], f"{where}: failed without a word")
        keys = [got["row_key"] for got in found]
        ensure(len(set(keys)) == len(keys), "two rows have one key")

    def _may_be_poison(self, got: dict[str, Any]) -> bool:
        """A row that was in the engine each of the times that somebody killed it is found guilty, rightly or not."""
        return got["error_code"] == "poison" and got["attempts"] >= 2 and self.deaths >= 2

    def _poisoned(self) -> bool:
        return any(self._may_be_poison(row) for row in self._output_rows())

    def _check_failures(self, rows: Sequence[Expected]) -> None:
        found = _read(self.run / "failures.parquet").to_pylist()
        output = self._output_rows()
        wanted = [
            (self.schedule.input_name, row.position, i, got["error_code"], got["row_key"])
            for i, (row, got) in enumerate(zip(rows, output, strict=True))
            if got["status"] == "failed"
        ]
        have = [(f["file"], f["position"], f["ordinal"], f["error_code"], f["row_key"]) for f in found]
        ensure(have == wanted, f"failures.parquet has {have}, should have {wanted}")
        for failure in found:
            ensure(failure["error"] and (failure["row"] is None) != (failure["raw"] is None), f"failure: {failure}")

    def _check_report(self, rows: Sequence[Expected]) -> None:
        whole = _read(self.run / "report.parquet").to_pylist()[-1]
        output = self._output_rows()
        ensure(whole["rows"] == len(rows), f"the report counts {whole['rows']} rows")
        done = sum(row["status"] == "done" for row in output)
        ensure(whole["done"] == done, f"the report counts {whole['done']} done, the output has {done}")
        failed = whole["failed"] + whole["refused"]
        ensure(failed == len(rows) - done, f"the report counts {failed} failed, the output has {len(rows) - done}")
        ensure(whole["pending"] == 0, f"the report counts {whole['pending']} pending")
        for name in ("output_tokens", "prompt_tokens"):
            total = sum(row[name] or 0 for row in output if row["status"] == "done")
            ensure(whole[name] == total, f"the report counts {whole[name]} {name}, the output has {total}")

    def _check_temporaries(self) -> None:
        left = [p.relative_to(self.folder) for p in self.folder.rglob("*") if re.match(r"\.tmp-|.*\.tmp$", p.name)]
        ensure(not left, f"temporaries are left: {', '.join(map(str, left))}")
        known = set(self._parts)
        more = [p.name for p in (self.run / "parts").glob("part-*") if p.name not in known and EXPLAINED not in p.name]
        ensure(not more, f"parts that are in no record are left: {', '.join(more)}")


def _asked_twice(ended: Ended) -> bool:
    """A Ctrl-C after a first signal ends a run at once, without a word."""
    sent = sorted((f["time"], f["kind"]) for f in ended.fired if f["kind"] in SIGNALS)
    return any(kind == "int" for _, kind in sent[1:])


def _is_early(fired: dict[str, Any]) -> bool:
    """Before the run has begun: while the job spec is read or modules are."""
    return bool(fired["op"] == "import" or fired["path"] == "job.yaml")


def _read(path: Path) -> pa.Table:
    try:
        return pq.ParquetFile(path, page_checksum_verification=True).read()
    except (OSError, pa.ArrowException) as e:
        raise Broken(f"{path.name} has a final name and cannot be read: {e}") from e
