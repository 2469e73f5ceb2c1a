"""A run's own folder: where each file is, who holds it, the manifest, and files that exist whole or not at all.

The manifest is the only truth about what is committed. What the records in it mean is the business of those who
write and read them; here they are JSON objects, one a line, appended and synced one by one.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bulkgen import __version__
from bulkgen.errors import HeldError, OutputError

FORMAT = 1
RUN_SUFFIX = ".bulkgen"
RUN_FOLDER = "_bulkgen"
_LOCK_PATIENCE_S = 0.5


class RunDir:
    """Paths inside the run folder of one output."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.job = path / "job.yaml"
        self.manifest = path / "manifest.jsonl"
        self.lock = path / "lock"
        self.progress = path / "progress.json"
        self.plan = path / "plan"
        self.parts = path / "parts"
        self.refused = path / "plan" / "refused.parquet"
        self.schema = path / "plan" / "schema.bin"
        self.failures = path / "failures.parquet"
        self.report = path / "report.parquet"
        self.shards = path / "shards.parquet"
        self.timeline = path / "timeline.parquet"
        self.timeline_log = path / "timeline.jsonl"
        self.log = path / "run.log"

    def engine_log(self, replica: int) -> Path:
        """Where one replica's engine writes its own words."""
        return self.path / f"engine-{replica}.log"

    @classmethod
    def of_output(cls, output: Path) -> "RunDir":
        """The run folder of an output: beside a `.parquet` file, inside a folder."""
        if output.suffix == ".parquet":
            return cls(output.with_name(output.name + RUN_SUFFIX))
        return cls(output / RUN_FOLDER)

    @classmethod
    def locate(cls, path: Path) -> "RunDir":
        """The run folder that a user means by an output file, an output folder or the run folder itself."""
        for candidate in (cls(path), cls.of_output(path), cls(path / RUN_FOLDER)):
            if candidate.manifest.is_file():
                return candidate
        raise OutputError(f"{path}: no bulkgen run here; give the output path of a job that `bulkgen run` has started")

    def create(self) -> None:
        """Make the folder, and prove that it can be written to, before anything expensive begins."""
        probe = self.path / f".tmp-probe-{os.getpid()}"
        try:
            self.parts.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"bulkgen")
            probe.unlink()
        except OSError as e:
            raise OutputError(
                f"{self.path}: cannot write the run folder ({e.strerror or e}); choose another output path or free it"
            ) from e

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the run against other processes while the block runs.

        The kernel drops the lock with its process, however that ends, so a lock is never stale.
        Raises HeldError that names the holder.
        """
        fd = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._take_lock(fd)
            who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(who).encode(), 0)
            yield
        finally:
            os.close(fd)

    def _take_lock(self, fd: int) -> None:
        until = time.monotonic() + _LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                # `status` holds it for an instant to see whether anybody does.
                if time.monotonic() > until:
                    raise HeldError(f"{self.path}: held by {_holder(fd)}; wait for it or stop it") from None
                time.sleep(0.02)
            except OSError as e:
                raise OutputError(
                    f"{self.lock}: cannot be locked ({e.strerror or e}); the output must be on a file system with flock"
                ) from e

    def is_held(self) -> bool:
        """Whether a process works on this run at this moment."""
        try:
            fd = os.open(self.lock, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False


def _holder(fd: int) -> str:
    try:
        who = json.loads(os.pread(fd, 4096, 0))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(who["since"]))
        return f"process {who['pid']} on {who['host']} since {since}"
    except (ValueError, KeyError, TypeError):
        return "another process"


class Manifest:
    """The append-only record of a run. A record is in it once `append` has returned, whatever happens next."""

    def __init__(self, path: Path) -> None:
        """Open for appending; a last line that a crash tore is cut off, since it was never acknowledged."""
        self.path = path
        self.records, self._size = _read_whole_records(path)
        try:
            self._file = path.open("ab", buffering=0)
            self._file.truncate(self._size)
        except OSError as e:
            raise OutputError(f"{path}: cannot open the manifest ({e.strerror or e})") from e
        if not self.records:
            self.append({"record": "format", "format": FORMAT, "bulkgen": __version__})
            sync(path.parent)

    def append(self, record: dict[str, Any]) -> None:
        """Write one record and sync it to disk."""
        line = json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n"
        data = line.encode()
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        except OSError as e:
            # Half a record must not stand before the next one.
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            raise OutputError(f"{self.path}: cannot append to the manifest ({e.strerror or e})") from e
        self._size += len(data)
        self.records.append(record)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """All records of one kind, oldest first."""
        return [r for r in self.records if r["record"] == kind]

    def close(self) -> None:
        """Close the file; everything appended is on disk already."""
        self._file.close()


def read_manifest(path: Path) -> list[dict[str, Any]]:
    """All whole records of a manifest; an unfinished last line does not count. Empty when there is no file.

    Raises OutputError for a manifest of another format or one that is damaged before its end.
    """
    return _read_whole_records(path)[0]


def _read_whole_records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The whole records of a manifest, and how many bytes they take."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    except OSError as e:
        raise OutputError(f"{path}: cannot read the manifest ({e.strerror or e})") from e
    records = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
            record["record"]
        except (ValueError, KeyError, TypeError):
            raise OutputError(
                f"{path}:{number}: damaged manifest record; restore the run folder or choose a new output"
            ) from None
        records.append(record)
    if records and records[0].get("format") != FORMAT:
        raise OutputError(
            f"{path}: written in format {records[0].get('format')!r}, this bulkgen reads format {FORMAT}; "
            "choose a new output or the bulkgen version that wrote it"
        )
    return records, data.rfind(b"\n") + 1


class RunLog:
    """What happened, for programs: one JSON object a line. Never a row's content."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, event: str, **facts: Any) -> None:
        """Append a line. A full disk must not end a run for the sake of its log."""
        line = json.dumps({"time": time.time(), "pid": os.getpid(), "event": event} | facts, ensure_ascii=False)
        with contextlib.suppress(OSError), self._path.open("a", encoding="utf-8") as f:
            f.write(line + "\n")


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block ends well it becomes `path`, synced, else it is gone.

    Raises OutputError naming `path` and the system's reason.
    """
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except OSError as e:
        raise OutputError(f"{path}: cannot be written ({e.strerror or e})") from e
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Make a file's content durable, or a folder's renames and new names."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
