"""The answer cache: one SQLite file that any number of runs read and write at the same time.

SQLite's rollback journal, not its write-ahead log, which needs shared memory and so a local disk. Writers take turns
for the fraction of a second that a batch takes.
"""

import contextlib
import json
import os
import sqlite3
import stat
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from bulkgen.errors import OutputError, SpecError

# So that no other file is taken for a cache: "bulk" in ASCII. Then the version of the tables and what is in them.
_APPLICATION, _VERSION = 0x62756C6B, 1
_TABLES = """
CREATE TABLE answers (key BLOB PRIMARY KEY, answer BLOB NOT NULL, bytes INTEGER NOT NULL, used INTEGER NOT NULL);
CREATE INDEX by_use ON answers (used DESC, bytes);
"""
# Seconds to wait for another writer.
_PATIENCE_S = 60.0
# Keys of a query: SQLite takes 32,766 variables, older ones 999.
_KEYS_AT_ONCE = 500
# Answers of a transaction, which others wait for.
_ANSWERS_AT_ONCE = 1000
# An answer that is used is marked so at most once in that time, lest each reader write.
_USE_IS_NEW_S = 3600
# Key and row of an answer in the table and its indices, about.
_ROW_BYTES = 80
# Room is made for more than is needed at the moment.
_FILL = 0.9

Answer = Mapping[str, Any]
_T = TypeVar("_T")


class AnswerCache:
    """Answers by request key, `max_bytes` of them at most; those that were not used for longest go first."""

    def __init__(self, path: Path, max_bytes: int, private: bool) -> None:
        """Open the cache, or make it. If `private`, nothing is put into one that others may look into.

        Raises SpecError for a file that is something else, OutputError where the system does not allow it.
        """
        self.path = path
        self._max_bytes = max_bytes
        self._private = private
        self._marks_uses = True
        with self._speaking():
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600 if private else 0o666))
            self._db = sqlite3.connect(path, timeout=_PATIENCE_S, isolation_level=None)
            try:
                self._prepare()
            except BaseException:
                self._db.close()
                raise

    def _prepare(self) -> None:
        application: int | None
        try:
            if self._pragma("application_id") == 0 and not self._tables():
                self._make()
            application, version = self._pragma("application_id"), self._pragma("user_version")
        except sqlite3.DatabaseError as e:
            if isinstance(e, sqlite3.OperationalError):
                raise
            application, version = None, 0
        if application != _APPLICATION:
            raise SpecError(f"{self.path}: is no answer cache of bulkgen; give cache.path a name of its own")
        if version != _VERSION:
            raise SpecError(
                f"{self.path}: is the answer cache of another version of bulkgen; remove it, or choose another "
                "cache.path"
            )

    def _make(self) -> None:
        self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        with self._writing():
            if not self._tables():  # nobody else was faster
                for statement in _TABLES.strip().splitlines():
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {_VERSION}")
                self._db.execute(f"PRAGMA application_id = {_APPLICATION}")

    def _tables(self) -> bool:
        return bool(self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])

    def _pragma(self, name: str) -> int:
        value: int = self._db.execute(f"PRAGMA {name}").fetchone()[0]
        return value

    def find(self, keys: Iterable[bytes]) -> Iterator[dict[bytes, Answer]]:
        """Those of the keys that have an answer, some hundred keys at a time. They count as used from now on.

        Raises OutputError.
        """
        for some in _batched(keys, _KEYS_AT_ONCE):
            with self._speaking():
                places = ",".join("?" * len(some))
                found = self._db.execute(
                    f"SELECT key, answer, used < ? FROM answers WHERE key IN ({places})",
                    (time.time() - _USE_IS_NEW_S, *some),
                )
                rows = found.fetchall()
                self._mark_used([key for key, _, used_long_ago in rows if used_long_ago])
            answers = {key: _read(key, answer) for key, answer, _ in rows if isinstance(key, bytes)}
            yield {key: answer for key, answer in answers.items() if answer is not None}

    def _mark_used(self, keys: Sequence[bytes]) -> None:
        if not keys or not self._marks_uses:
            return
        try:
            with self._writing():
                now = int(time.time())
                self._db.executemany("UPDATE answers SET used = ? WHERE key = ?", [(now, key) for key in keys])
        except sqlite3.Error:
            # A cache that may only be read is as good, and so is one that others hold: one wait for them is enough.
            self._marks_uses = False

    def put(self, answers: Iterable[tuple[bytes, Answer]]) -> None:
        """Keep answers; they replace those under the same keys, and others go where they are too many.

        Raises OutputError.
        """
        if self._private:
            self._close_to_others()
        unchecked = 0
        for some in _batched(answers, _ANSWERS_AT_ONCE):
            now = int(time.time())
            told = [(key, _packed(key, answer)) for key, answer in some]
            rows = [(key, answer, len(answer) + _ROW_BYTES, now) for key, answer in told]
            with self._speaking(), self._writing():
                self._db.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", rows)
            unchecked += sum(size for _, _, size, _ in rows)
            if unchecked > (1 - _FILL) * self._max_bytes:
                self._shrink()
                unchecked = 0
        self._shrink()

    def _close_to_others(self) -> None:
        """Take the rights of others from it, which a run that may share its rows has left them."""
        with self._speaking():
            mode = stat.S_IMODE(self.path.stat().st_mode)
        if mode & 0o077:
            try:
                self.path.chmod(mode & ~0o077)
            except OSError as e:
                raise OutputError(
                    f"{self.path}: others may look into this answer cache ({e.strerror or e}), so nothing was put in; "
                    "set output.private: false where that is in order, or choose another cache.path"
                ) from e

    def _shrink(self) -> None:
        """Let answers go until the rest takes less than `max_bytes`."""
        with self._speaking():
            if self._bytes() <= self._max_bytes:
                return
            with self._writing():
                self._db.execute(
                    "DELETE FROM answers WHERE rowid IN (SELECT rowid FROM "
                    "(SELECT rowid, sum(bytes) OVER (ORDER BY used DESC, rowid DESC) AS total FROM answers) "
                    "WHERE total > ?)",
                    (int(_FILL * self._max_bytes),),
                )
            self._db.executescript("PRAGMA incremental_vacuum")  # `execute` frees one page alone

    def _bytes(self) -> int:
        """What all answers take."""
        total: int = self._db.execute("SELECT coalesce(sum(bytes), 0) FROM answers").fetchone()[0]
        return total

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """One transaction, whole or not at all."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")  # which others may keep it from
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def _speaking(self) -> Iterator[None]:
        """Turns what the system or SQLite say into an OutputError that names the file."""
        try:
            yield
        except (OSError, UnicodeDecodeError, sqlite3.Error) as e:  # the second one where it quotes a damaged file
            reason = e.strerror or e if isinstance(e, OSError) else e
            raise OutputError(f"{self.path}: the answer cache cannot be used ({reason})") from e


def _batched(values: Iterable[_T], most: int) -> Iterator[list[_T]]:
    rest = iter(values)
    while some := list(islice(rest, most)):
        yield some


def _packed(key: bytes, answer: Answer) -> bytes:
    return zlib.compress(json.dumps([key.hex(), answer]).encode(), 1)


def _read(key: bytes, stored: bytes) -> Answer | None:
    """An answer as it was put; None for what is damaged, or is not under its own key: it is as if it were not there."""
    try:
        own, answer = json.loads(zlib.decompress(stored))
    except (TypeError, ValueError, zlib.error):
        return None
    return answer if own == key.hex() and isinstance(answer, dict) else None
