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
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bulkgen import __version__
from bulkgen.errors import HeldError, OutputError
from bulkgen.secrecy import hushed

FORMAT = 4
RUN_SUFFIX = ".bulkgen"
RUN_FOLDER = "_bulkgen"
_LOCK_PATIENCE_S = 0.5
# What others than the owner may do: nothing, in a folder that holds rows and logs.
_OTHERS = 0o077
# What the system says of a file without a name where a file system knows none, or the kernel does not.
_NO_NAMELESS_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)
_SENTENCES = ("message", "reason", "text")


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
        """Where one replica's engine writes its own words; a file that is there, with the rights of the folder."""
        path = self.path / f"engine-{replica}.log"
        with contextlib.suppress(OSError):
            os.close(_open_to_append(path))
        return path

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

    @property
    def output(self) -> Path:
        """The output whose run folder this is."""
        path = self.path
        if path.name in ("", ".."):  # somebody stands in it, or below it
            path = Path(os.path.normpath(path.absolute()))
        return path.parent if path.name == RUN_FOLDER else path.with_name(path.stem)

    def create(self, private: bool = True) -> None:
        """Make the folder, and prove that it and what it lies in can be written to, before anything expensive begins.

        A private one is its owner's alone, also where it was not so far; one that is stricter than it need be stays
        so. What is in it is files and folders: a link in it might lead anywhere. Raises OutputError.
        """
        made: list[Path] = []
        try:
            made += [folder for folder in (self.parts, self.path, *self.path.parents) if not folder.exists()]
            _make_folder(self.path, 0o700 if private else 0o777)
            if private:
                _refuse_others(self.path)
            _refuse_links(self.path)
            self.parts.mkdir(0o700 if private else 0o777, exist_ok=True)
            if private:
                _keep_from_others(self.path)
            for folder in (self.path.parent, self.path):
                _probe(folder)
            os.close(_open_to_append(self.timeline_log))
        except (OSError, OutputError) as e:
            for folder in made:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            if isinstance(e, OutputError):
                raise
            what = f"{e.filename or self.path}: {e.strerror or e}"
            raise OutputError(
                f"{self.path}: cannot write the run folder ({what}); choose another output path or free it"
            ) from e

    def temporaries(self) -> list[Path]:
        """Files and folders that are under way to their own name, or that a process which was killed has left so."""
        folders = (self.path, self.parts, self.plan)
        return [path for folder in folders for path in folder.glob(".tmp-*")]

    @contextlib.contextmanager
    def kept_private(self) -> Iterator[None]:
        """While this lasts, what this process writes is for nobody who may not look into the run folder.

        For the plan, whose files are written plainly. Not for whole runs: an engine downloads models, and output and
        caches are made as the user's umask says.
        """
        umask = os.umask(_OTHERS)
        # What the folder does not grant, files in it do not either.
        os.umask(umask | (~self.path.stat().st_mode & _OTHERS))
        try:
            yield
        finally:
            os.umask(umask)

    def show(self, text: str) -> None:
        """Replace what progress.json says. Not worth ending a run for, and not synced: the manifest is."""
        temporary = self.progress.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
            with os.fdopen(_open_to_append(temporary), "w", encoding="utf-8") as file:
                file.write(text)
            temporary.replace(self.progress)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the run against other processes while the block runs.

        The kernel drops the lock with its process, however that ends, so a lock is never stale.
        Raises HeldError that names the holder.
        """
        try:
            fd = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _mode_in(self.path))
        except OSError as e:
            raise OutputError(f"{self.lock}: cannot be written ({e.strerror or e}); free the place") from e
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
                break
            except BlockingIOError:
                # `status` holds it for an instant to see whether anybody does.
                if time.monotonic() > until:
                    raise HeldError(f"{self.path}: held by {_holder(fd)}; wait for it or stop it") from None
                time.sleep(0.02)
            except OSError as e:
                raise OutputError(
                    f"{self.lock}: cannot be locked ({e.strerror or e}); the output must be on a file system with flock"
                ) from e
        if not os.fstat(fd).st_nlink:
            raise HeldError(f"{self.path}: its lock was removed at this moment; look whether another run works on it")

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
        self._torn = False  # more than `_size` bytes may be in the file
        try:
            self._file = os.fdopen(_open_to_append(path), "ab", buffering=0)
            self._file.truncate(self._size)
        except OSError as e:
            raise OutputError(f"{path}: cannot open the manifest ({e.strerror or e})") from e
        if not self.records:
            self.append({"record": "format", "format": FORMAT, "bulkgen": __version__})
            sync(path.parent)

    def append(self, record: dict[str, Any]) -> None:
        """Write one record and sync it to disk. Sentences in it are kept free of secrets."""
        record = _hushed(record)
        # ASCII alone: whatever a record holds, it can be written, and drives no terminal.
        data = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        try:
            self._check_place()
            if self._torn:
                self._take_back()
            self._torn = True
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
            self._torn = False
        except OSError as e:
            with contextlib.suppress(OSError):
                self._take_back()
            raise OutputError(f"{self.path}: cannot append to the manifest ({e.strerror or e})") from e
        self._size += len(data)
        self.records.append(record)

    def _check_place(self) -> None:
        """Raise OutputError where the file is no longer the one that is read next time, or others have changed it."""
        facts = os.fstat(self._file.fileno())
        if not facts.st_nlink:
            what = "was removed or replaced"
        elif facts.st_size < self._size or (facts.st_size > self._size and not self._torn):
            what = "was changed by others"
        else:
            return
        raise OutputError(
            f"{self.path}: {what} while the run worked; what is done since then is not on record: see what happened to "
            "the run folder, and run again"
        )

    def _take_back(self) -> None:
        """Cut off what was not acknowledged: half a record must not stand before the next one."""
        self._file.truncate(self._size)
        self._torn = False

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
            "choose another output.path, go on with the version of bulkgen that wrote it, or remove the run folder and "
            "the output to begin anew"
        )
    return records, data.rfind(b"\n") + 1


class RunLog:
    """What happened, for programs: one JSON object a line. Never a row's content."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, event: str, **facts: Any) -> None:
        """Append a line. A full disk must not end a run for the sake of its log."""
        line = json.dumps({"time": time.time(), "pid": os.getpid(), "event": event} | _hushed(facts))
        with contextlib.suppress(OSError), os.fdopen(_open_to_append(self._path), "a", encoding="ascii") as f:
            f.write(line + "\n")


def _hushed(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts whose sentences, which may be an engine's own, hold no secret. All else is compared later, and stays."""
    return facts | {name: hushed(facts[name]) for name in _SENTENCES if isinstance(facts.get(name), str)}


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block ends well it becomes `path`, synced, else it is gone.

    The temporary file is there, and empty, so that nobody's link can be in its place, and nobody may read it who may
    not read the folder. Raises OutputError naming `path` and the system's reason.
    """
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        temporary.unlink(missing_ok=True)
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _mode_in(path.parent)))
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except OSError as e:
        raise OutputError(f"{path}: cannot be written ({e.strerror or e})") from e
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _mode_in(folder: Path) -> int:
    """The rights of a new file, before the umask: no more than its folder gives to the same people."""
    return stat.S_IMODE(folder.stat().st_mode) & 0o666


def _open_to_append(path: Path) -> int:
    """Open a file, or make it, but not follow a link in its place."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, _mode_in(path.parent))


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """All that lies in a folder, at any depth, a folder before what is in it. Follows no link.

    A run that works in it removes and renames meanwhile; what is gone is passed over.
    """
    with contextlib.suppress(FileNotFoundError):
        with os.scandir(folder) as listed:
            entries = list(listed)
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(Path(entry.path))


def _refuse_others(folder: Path) -> None:
    """Whoever owns a folder may look into it, whatever is in it, and put other things in their place."""
    owner = folder.lstat().st_uid
    # Not by our own number: some file systems give all files to one user.
    if owner not in (os.geteuid(), _probe(folder)):
        raise OutputError(
            f"{folder}: belongs to another user (number {owner}), who could read the rows; choose another "
            "output.path, or set output.private: false where that is in order"
        )


def _refuse_links(folder: Path) -> None:
    for entry in _entries(folder):
        if not entry.is_dir(follow_symlinks=False) and not entry.is_file(follow_symlinks=False):
            what = "a symbolic link" if entry.is_symlink() else "neither a file nor a folder"
            raise OutputError(f"{entry.path}: is {what}, and bulkgen writes to none in a run folder; remove it")


def _keep_from_others(folder: Path) -> None:
    """Take the rights of others from a folder and what is in it, where it is ours."""
    for path in (folder, *(Path(entry.path) for entry in _entries(folder))):
        with contextlib.suppress(FileNotFoundError):
            facts = path.lstat()
            if facts.st_uid == os.geteuid() and facts.st_mode & _OTHERS and not stat.S_ISLNK(facts.st_mode):
                path.chmod(stat.S_IMODE(facts.st_mode) & ~_OTHERS)


def _make_folder(folder: Path, mode: int) -> None:
    """Make a folder that may be there, and those that it lies in, these with the rights that folders usually get."""
    with contextlib.suppress(FileExistsError):
        try:
            folder.mkdir(mode)
        except FileNotFoundError:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode)


def _probe(folder: Path) -> int:
    """Whose a new file in a folder is. Raises OSError where it takes none.

    Really writes one: to root, rights say nothing.
    The file has no name, so that no crash can leave it behind, where the file system has such.
    """
    try:
        fd = os.open(folder, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as e:
        if e.errno not in _NO_NAMELESS_FILES:
            raise
        fd = _probe_by_name(folder)
    try:
        os.write(fd, b"bulkgen")
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)


def _probe_by_name(folder: Path) -> int:
    probe = folder / f".tmp-probe-{os.getpid()}"
    probe.unlink(missing_ok=True)  # of another process with this number, which was killed
    fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    probe.unlink()
    return fd


def sync(path: Path) -> None:
    """Make a file's content durable, or a folder's renames and new names."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
