"""Faults inside the processes of a run: counts what they do to files and say to each other, and errs at the nth time.

Python imports this at its start where its folder is on PYTHONPATH; bulkgen knows nothing of it. It does nothing but
where the environment names a list of faults. Only what lies in the job's own folder counts, so that the nth
operation is one of the run's and not of some library's cache.
"""

# It stands below pathlib, which uses what is hooked here.
# ruff: noqa: PTH100, PTH109, PTH116, PTH118, PTH119, PTH120

import builtins
import errno
import importlib.machinery
import importlib.util
import io
import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

FAULTS = "BULKGEN_TEST_FAULTS"
_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT, "hup": signal.SIGHUP}
_ERRORS = ("ENOSPC", "EIO", "EACCES", "EDQUOT")
# What a full disk stops once it is full.
_NEED_ROOM = ("open", "write", "mkdir")
_DELAY_S = 0.3

_real_open, _real_os_open, _real_write = io.open, os.open, os.write
_real_readlink, _real_exists = os.readlink, os.path.exists


class Injector:
    """Counts this process's operations and knows which fault is due at which of them."""

    def __init__(self, plan: dict[str, Any], role: str) -> None:
        self.root = plan["root"]
        self._journal = plan["journal"]
        self._role = role
        self._faults = [(i, f) for i, f in enumerate(plan["faults"]) if role.startswith(f["role"])]
        self._counts: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._tracks = any(f["kind"] == "power" for f in plan["faults"])

    def inside(self, path: Any, dir_fd: int | None = None) -> str | None:
        """A path in the job's folder as absolute text; None for any other. Takes what os functions take."""
        try:
            if isinstance(path, int):
                full = _real_readlink(f"/proc/self/fd/{path}")
            else:
                text = os.fsdecode(path)
                base = os.getcwd() if dir_fd is None else _real_readlink(f"/proc/self/fd/{dir_fd}")
                full = os.path.normpath(os.path.join(base, text))
        except (OSError, TypeError, ValueError):
            return None
        return full if full.startswith(self.root + "/") else None

    def begin(self, op: str, path: str, counts: bool = True) -> list[tuple[int, dict[str, Any]]]:
        """An operation is about to be done. Fires what is due before it; returns what is due after or amid it.

        One that does not `count` among operations of any sort does so among those of its own.
        """
        later = []
        with self._lock:
            ops = (op, "any") if counts else (op,)
            self._counts.update(ops)
            now = {name: self._counts[name] for name in ops}
        for i, fault in self._faults:
            if now.get(fault["op"]) == fault["nth"] and self._claim(i, fault, op, path):
                if fault["mode"] == "before":
                    self.fire(fault, path)
                else:
                    later.append((i, fault))
            elif fault["lasting"] and op in _NEED_ROOM and _real_exists(f"{self._journal}/lasting-{i}"):
                self.fire(fault, path)
        return later

    def end(self, later: Sequence[tuple[int, dict[str, Any]]], path: str) -> None:
        """The operation is done."""
        for _, fault in later:
            self.fire(fault, path)

    def fire(self, fault: dict[str, Any], path: str) -> None:
        """Let a fault happen."""
        kind = fault["kind"]
        if kind in _ERRORS:
            number = getattr(errno, kind)
            raise OSError(number, os.strerror(number), path)
        if kind == "delay":
            time.sleep(_DELAY_S)
            return
        number = signal.SIGKILL if kind == "power" else _SIGNALS[kind]
        os.kill(os.getpid(), number)
        if number == signal.SIGKILL:
            time.sleep(60)

    def _claim(self, i: int, fault: dict[str, Any], op: str, path: str) -> bool:
        """Whether the fault may fire once more; over all processes of a start it does so `times` times."""
        for k in range(fault["times"]):
            try:
                os.close(_real_os_open(f"{self._journal}/fault-{i}-{k}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            except FileExistsError:
                continue
            where = path.removeprefix(self.root + "/")
            self._note("fired", fault=i, role=self._role, op=op, path=where, time=time.time())
            if fault["lasting"]:
                os.close(_real_os_open(f"{self._journal}/lasting-{i}", os.O_CREAT | os.O_WRONLY))
            return True
        return False

    def _note(self, name: str, **facts: Any) -> None:
        fd = _real_os_open(f"{self._journal}/{name}.jsonl", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        try:
            _real_write(fd, json.dumps(facts).encode() + b"\n")
        finally:
            os.close(fd)

    def dirty(self, path: str, size: int) -> None:
        """From now on `path` may hold more than `size` bytes that would not outlive the machine."""
        if self._tracks:
            self._note("disk", do="dirty", path=path, size=size)

    def synced(self, path: str) -> None:
        """A file or folder is durable as it is now."""
        if self._tracks:
            self._note("disk", do="synced", path=path, size=os.stat(path).st_size if _real_exists(path) else 0)

    def renamed(self, old: str, new: str, replaced: bool) -> None:
        """A name has changed and would not outlive the machine until its folder is synced."""
        if self._tracks:
            self._note("disk", do="renamed", path=old, new=new, replaced=replaced)

    def counts(self) -> None:
        """Write down what was counted, for those who choose the ranges of `nth`."""
        self._note("counts", role=self._role, counts=dict(self._counts))


class HookedFile(io.FileIO):
    """A file whose writes are counted."""

    counts = True

    def __init__(self, injector: Injector, path: str, file: Any, mode: str, opener: Any = None) -> None:
        super().__init__(file, mode, opener=opener)
        self.injector, self.path = injector, path
        injector.dirty(path, os.fstat(self.fileno()).st_size if "a" in mode or "r" in mode else 0)

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        later = self.injector.begin("write", self.path, self.counts)
        if any(fault["mode"] == "torn" for _, fault in later):
            written = super().write(view[: len(view) // 2])
            self.injector.end(later, self.path)
            return written or 0
        written = super().write(view)
        self.injector.end(later, self.path)
        return written or 0

    def truncate(self, size: int | None = None, /) -> int:
        later = self.injector.begin("truncate", self.path)
        result = super().truncate(size)
        self.injector.end(later, self.path)
        return result


class WholeFile(HookedFile):
    """For pyarrow, which takes it that a write wrote all, and writes a file in dozens of pieces."""

    counts = False

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += super().write(view[done:])
        return done


def _hook_open(injector: Injector) -> None:
    def hooked(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        path = None if isinstance(file, int) else injector.inside(file)
        if path is None:
            return _real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        if not set(mode) & set("wax+"):
            later = injector.begin("read", path)
            result: Any = _real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
            injector.end(later, path)
            return result
        later = injector.begin("open", path)
        result = HookedFile(injector, path, file, mode.replace("b", "").replace("t", ""), opener)
        if buffering != 0:
            result = io.BufferedRandom(result) if "+" in mode else io.BufferedWriter(result)
            if "b" not in mode:
                result = io.TextIOWrapper(result, encoding, errors, newline)
        injector.end(later, path)
        return result

    io.open = builtins.open = hooked


def _hook_os(injector: Injector) -> None:
    def hook(name: str, op: str, places: int = 1) -> None:
        real: Callable[..., Any] = getattr(os, name)

        def hooked(path: Any, *args: Any, **options: Any) -> Any:
            dir_fd = options.get("dir_fd", options.get("src_dir_fd"))
            kind = op
            if name == "open":
                flags = args[0] if args else options["flags"]
                kind = "open" if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else "read"
            inside = injector.inside(path, dir_fd)
            if inside is None:
                return real(path, *args, **options)
            new = injector.inside(args[0]) if places == 2 else None
            later = injector.begin(kind, inside)
            replaced = new is not None and _real_exists(new)
            result = real(path, *args, **options)
            if op == "fsync":
                injector.synced(inside)
            elif new is not None:
                injector.renamed(inside, new, replaced)
            injector.end(later, inside)
            return result

        setattr(os, name, hooked)
        # Others ask these sets whether a function takes `dir_fd` and the like.
        for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
            if real in able:
                able.add(hooked)

    for name, op in (
        ("open", "open"),
        ("fsync", "fsync"),
        ("mkdir", "mkdir"),
        ("unlink", "unlink"),
        ("rmdir", "unlink"),
        ("ftruncate", "truncate"),
        ("pwrite", "write"),
        ("write", "write"),
    ):
        hook(name, op)
    hook("rename", "rename", 2)
    hook("replace", "rename", 2)


def _hook_sockets(injector: Injector) -> None:
    class Socket(socket.socket):
        def sendall(self, *args: Any) -> None:
            later = injector.begin("send", "")
            super().sendall(*args)
            injector.end(later, "")

        def recv(self, *args: Any) -> bytes:
            data = super().recv(*args)
            if data:
                injector.end(injector.begin("recv", ""), "")
            return data

    socket.socket = Socket  # type: ignore[misc]


def _hook_pyarrow(injector: Injector, pa: Any) -> None:
    real_file, real_map = pa.OSFile, pa.memory_map

    def os_file(path: Any, mode: str = "r", *args: Any) -> Any:
        inside = injector.inside(path)
        if inside is None:
            return real_file(path, mode, *args)
        later = injector.begin("open" if mode.startswith("w") else "read", inside)
        if mode.startswith("w"):
            result = pa.PythonFile(WholeFile(injector, inside, path, "w"), "w")
        else:
            result = real_file(path, mode, *args)
        injector.end(later, inside)
        return result

    def memory_map(path: Any, *args: Any) -> Any:
        inside = injector.inside(path)
        later = injector.begin("read", inside) if inside else []
        result = real_map(path, *args)
        injector.end(later, inside or "")
        return result

    pa.OSFile, pa.memory_map = os_file, memory_map


def _hook_parquet(injector: Injector, core: Any) -> None:
    """Files that pyarrow opens itself, by their path."""
    real_init, real_write = core.ParquetWriter.__init__, core.ParquetWriter.write_table

    def init(self: Any, where: Any, *args: Any, **options: Any) -> None:
        inside = injector.inside(where) if isinstance(where, str | os.PathLike) else None
        self._hooked_path = inside
        later = injector.begin("open", inside) if inside else []
        if inside:
            injector.dirty(inside, 0)
        real_init(self, where, *args, **options)
        injector.end(later, inside or "")

    def write_table(self: Any, *args: Any, **options: Any) -> None:
        inside = self._hooked_path
        later = injector.begin("write", inside) if inside else []
        real_write(self, *args, **options)
        injector.end(later, inside or "")

    core.ParquetWriter.__init__, core.ParquetWriter.write_table = init, write_table


class _Imports:
    """Hooks modules as they are imported, and counts those of bulkgen."""

    def __init__(self, injector: Injector) -> None:
        self._injector = injector
        self._hooks = {"pyarrow": _hook_pyarrow, "pyarrow.parquet.core": _hook_parquet}

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] == "bulkgen":
            self._injector.end(self._injector.begin("import", name, False), name)
        hook = self._hooks.pop(name, None)
        if hook is None:
            return None
        spec = importlib.util.find_spec(name) if path is None else importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        real = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            real(module)
            hook(self._injector, module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _role() -> str | None:
    arguments = sys.orig_argv
    if "bulkgen.replica" in arguments:
        log = os.path.basename(_real_readlink("/proc/self/fd/1"))
        return "replica" + "".join(c for c in log if c.isdigit())
    module = arguments.index("-m") + 1 if "-m" in arguments else 0
    return "driver" if module and arguments[module : module + 2] == ["bulkgen", "run"] else None


def _install() -> None:
    place, role = os.environ.get(FAULTS), _role()
    if place is None or role is None:
        return
    with _real_open(place) as f:
        plan = json.load(f)
    injector = Injector(plan, role)
    if role == "driver":
        # As from a terminal, wherever the tests run.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _hook_open(injector)
    _hook_os(injector)
    _hook_sockets(injector)
    sys.meta_path.insert(0, _Imports(injector))
    if plan.get("count"):
        import atexit

        atexit.register(injector.counts)


def _give_way() -> None:
    """An environment may have a sitecustomize of its own, which this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    places = [place for place in sys.path if os.path.abspath(place) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", places)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get(FAULTS):
    _install()
    _give_way()
