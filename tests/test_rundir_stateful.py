"""The manifest under any order of appends, failing disks, crashes and reopening, against a plain list.

The contract: what `append` has returned for is there after every reopening, in order. What it raised for is not there,
unless the disk did not even let it take the record back; and nothing else ever is.
"""

import errno
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bulkgen.errors import OutputError
from bulkgen.rundir import Manifest, RunDir, read_manifest

# Bytes that a crash may leave behind the last record: half a record, zeros, what another file once held. No line end,
# since a record's own comes last.
TAILS = st.one_of(st.just(b'{"record":"part","na'), st.just(bytes(7)), st.binary(max_size=20)).map(
    lambda data: data.replace(b"\n", b"")
)
PAYLOADS = st.dictionaries(st.text(max_size=5), st.one_of(st.none(), st.integers(), st.text(max_size=30)), max_size=3)


class Disk:
    """What goes wrong at the next operations: a write that takes only some bytes, then what cannot be done at all."""

    takes: int | None = None
    fails_sync = False
    fails_truncate = False


class DiskFile(io.FileIO):
    """A file on such a disk."""

    disk = Disk()

    def write(self, data: Any, /) -> int:
        if self.disk.takes is None:
            return super().write(data) or 0
        if self.disk.takes == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(bytes(data)[: self.disk.takes]) or 0

    def truncate(self, size: int | None = None, /) -> int:
        if self.disk.fails_truncate:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().truncate(size)


def open_manifest(path: Path) -> Manifest:
    """A manifest on such a disk."""
    with patch("os.fdopen", lambda fd, mode, buffering: DiskFile(fd, mode)):
        return Manifest(path)


class ManifestMachine(RuleBasedStateMachine):
    """`known` are the records that must be there, each with whether it must, or only may."""

    def __init__(self) -> None:
        super().__init__()
        self.run = RunDir(Path(tempfile.mkdtemp()))
        self.path = self.run.manifest
        self.known: list[tuple[dict[str, Any], bool]] = []
        self.number = 0

    def teardown(self) -> None:
        self.manifest.close()
        shutil.rmtree(self.run.path)

    @initialize()
    def begin(self) -> None:
        self.manifest = open_manifest(self.path)

    def record(self, payload: dict[str, Any]) -> dict[str, Any]:
        self.number += 1
        return {**payload, "record": "part", "number": self.number}

    @rule(payload=PAYLOADS)
    def append(self, payload: dict[str, Any]) -> None:
        record = self.record(payload)
        self.manifest.append(record)
        self.known.append((record, True))

    @rule(payload=PAYLOADS, takes=st.integers(0, 60), can_take_back=st.booleans())
    def append_on_a_full_disk(self, payload: dict[str, Any], takes: int, can_take_back: bool) -> None:
        record = self.record(payload)
        size = len(json.dumps(record, separators=(",", ":"))) + 1
        with failing(takes=min(takes, size - 1), fails_truncate=not can_take_back), pytest.raises(OutputError):
            self.manifest.append(record)

    @rule(payload=PAYLOADS, can_take_back=st.booleans())
    def append_that_cannot_be_synced(self, payload: dict[str, Any], can_take_back: bool) -> None:
        record = self.record(payload)
        with failing(fails_sync=True, fails_truncate=not can_take_back), pytest.raises(OutputError):
            self.manifest.append(record)
        if not can_take_back:
            self.known.append((record, False))

    @rule()
    def reopen(self) -> None:
        self.manifest.close()
        self.manifest = open_manifest(self.path)

    @rule(tail=TAILS)
    def crash(self, tail: bytes) -> None:
        """The process is gone, and something of a record that it was writing stands at the end."""
        self.manifest.close()
        with self.run.manifest.open("ab") as f:
            f.write(tail)
        self.expect(read_manifest(self.run.manifest))
        self.manifest = open_manifest(self.path)

    @rule(payload=PAYLOADS, keep=st.integers(0, 1000))
    def crash_amid_an_append(self, payload: dict[str, Any], keep: int) -> None:
        """Any number of a record's bytes reached the disk before the machine stopped, perhaps all but the last."""
        line = json.dumps(self.record(payload)).encode()
        self.crash(line[:keep])

    @precondition(lambda self: self.known)
    @rule(junk=st.sampled_from([b"\x00\n", b"[]\n", b"{}\n", b"\xff\xfe\n", b"\n", b"null\n", b'{"record":"part"\n']))
    def damage_before_the_end_is_told(self, junk: bytes) -> None:
        data = self.run.manifest.read_bytes()
        self.manifest.close()
        self.run.manifest.write_bytes(data[: data.index(b"\n") + 1] + junk + data[data.index(b"\n") + 1 :])
        with pytest.raises(OutputError, match=r"manifest.jsonl:2: damaged"):
            open_manifest(self.path)
        self.run.manifest.write_bytes(data)
        self.manifest = open_manifest(self.path)

    @invariant()
    def nothing_is_lost_or_made_up(self) -> None:
        """What another process reads at any moment."""
        self.expect(read_manifest(self.run.manifest))

    @invariant()
    def it_knows_what_it_has_taken(self) -> None:
        records = self.manifest.records[1:]
        assert [r for r, sure in self.known if sure or r in records] == records

    def expect(self, records: list[dict[str, Any]]) -> None:
        assert [r["record"] for r in records[:1]] == ["format"]
        assert [r for r, sure in self.known if sure or r in records] == records[1:]


@contextmanager
def failing(*, takes: int | None = None, fails_sync: bool = False, fails_truncate: bool = False) -> Iterator[None]:
    """A bad disk for a moment."""
    disk = DiskFile.disk
    disk.takes, disk.fails_truncate = takes, fails_truncate
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    try:
        with patch("os.fsync", side_effect=error if fails_sync else None):
            yield
    finally:
        disk.takes, disk.fails_truncate = None, False


TestManifest = ManifestMachine.TestCase
TestManifest.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
