"""Finding the input: from the paths of a job to the data files they mean, in a fixed order, each file once.

Looks at names and file facts only, never into a file.
"""

import errno
import glob
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bulkgen.errors import InputError

Format = Literal["parquet", "jsonl"]
Compression = Literal["gzip", "zstd"]

_SUFFIXES: dict[str, tuple[Format, Compression | None]] = {
    ".parquet": ("parquet", None),
    ".pq": ("parquet", None),
    ".jsonl": ("jsonl", None),
    ".ndjson": ("jsonl", None),
    ".jsonl.gz": ("jsonl", "gzip"),
    ".ndjson.gz": ("jsonl", "gzip"),
    ".jsonl.zst": ("jsonl", "zstd"),
    ".ndjson.zst": ("jsonl", "zstd"),
}
_READABLE = "bulkgen reads .parquet, .pq, .jsonl and .ndjson, the last two also with .gz or .zst"
_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the input.

    `name` is how the user knows it and part of a row's identity: a POSIX path, relative to the job's folder
    where the user's path was so, or where the file lies below that folder.
    """

    path: Path
    name: str
    format: Format
    compression: Compression | None
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """`left_out` names the data files that folders and globs hold but the rule on `_` and `.` keeps out."""

    files: tuple[InputFile, ...]
    left_out: tuple[str, ...]


def find_files(paths: Sequence[str], base: Path, exclude: Sequence[Path]) -> FoundFiles:
    """The files that `paths` (files, folders, globs; relative to `base`) mean.

    Paths keep the order they are given in; within each, names are in natural order (part-2 before part-10). A
    file reached twice, also through links, counts once. In folders and globs, files and folders whose name
    begins with `_` or `.`, and run folders of bulkgen, are left out; a file that is named itself never is.
    What `exclude` names or holds is never read. Raises InputError for a path that leads to no data file.
    """
    base = base.absolute()
    excluded = tuple(_real(path) for path in exclude)
    files: dict[Path, InputFile] = {}
    left_out: dict[Path, str] = {}
    for text in paths:
        try:
            found = _expand(text, base)
            wanted = [path for path in found.wanted if not _lies_in(_real(path), excluded)]
            if not wanted:
                raise InputError(_why_nothing(text, base, found))
            for path in wanted:
                files.setdefault(_real(path), _input_file(path, text, base))
        except OSError as error:
            place = os.fsdecode(error.filename) if error.filename else text
            problem = f"{place}: cannot be read ({error.strerror}); check the path and its rights"
            raise InputError(problem) from error
        left_out.update((_real(path), _name(path, text, base)) for path in found.left_out)
    return FoundFiles(
        tuple(files.values()),
        tuple(name for real, name in left_out.items() if real not in files and not _lies_in(real, excluded)),
    )


def natural_order(path: Path) -> list[tuple[tuple[int | str, ...], str]]:
    """Sort key that reads digits as numbers, folder by folder."""
    return [(tuple(int(p) if p.isdecimal() else p for p in _DIGITS.split(part)), part) for part in path.parts]


@dataclass(frozen=True, slots=True)
class _Expansion:
    wanted: list[Path]
    left_out: list[Path]


def _expand(text: str, base: Path) -> _Expansion:
    path = base / text
    if path.is_dir():
        return _sift(_walk(path, set()), path)
    if os.path.lexists(path):
        if _format(path) is None:
            raise InputError(f"{text}: not a kind of file that can be read; {_READABLE}")
        return _Expansion([path], [])
    if glob.has_magic(text):
        return _expand_glob(text, base)
    raise InputError(f"{text}: no such file or folder; looked for {os.path.normpath(path)}")


def _expand_glob(text: str, base: Path) -> _Expansion:
    parts = Path(text).parts
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    matches = [base / match for match in glob.glob(text, root_dir=base, recursive=True)]  # noqa: PTH207
    seen: set[Path] = set()
    found: dict[Path, None] = {}
    for match in sorted(matches, key=natural_order):
        if match.is_dir():
            found.update(dict.fromkeys(_walk(match, seen)))
        elif _format(match) is not None:
            found[match] = None
    if any(part[0] in "._" for part in parts[fixed:]):  # asks for such names itself
        return _Expansion(sorted(found, key=natural_order), [])
    return _sift(found, base.joinpath(*parts[:fixed]))


def _sift(found: Iterator[Path] | dict[Path, None], root: Path) -> _Expansion:
    expansion = _Expansion([], [])
    for path in sorted(found, key=natural_order):
        parts = path.relative_to(root).parts
        if any(_is_run_folder(part) for part in parts[:-1]):
            continue
        hidden = any(part[0] in "._" for part in parts)
        (expansion.left_out if hidden else expansion.wanted).append(path)
    return expansion


def _walk(folder: Path, seen: set[Path]) -> Iterator[Path]:
    """All data files below `folder`; `seen` are the folders walked so far, since links can lead in
    circles."""
    real = _real(folder)
    if real in seen:
        return
    seen.add(real)
    with os.scandir(folder) as entries:
        listing = list(entries)
    for entry in listing:
        path = folder / entry.name
        if _is_folder(entry):
            if not entry.name.startswith(".") and not _is_run_folder(entry.name):
                yield from _walk(path, seen)
        elif _format(path) is not None:
            yield path


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False  # a link to itself; if it has the name of a data file, opening it tells
        raise


def _real(path: Path) -> Path:
    """The path without links. One that leads in circles is what is left, and no file."""
    return Path(os.path.realpath(path))


def _is_run_folder(name: str) -> bool:
    return name == "_bulkgen" or name.endswith(".bulkgen")


def _lies_in(path: Path, folders: Sequence[Path]) -> bool:
    return any(path == folder or folder in path.parents for folder in folders)


def _format(path: Path) -> tuple[Format, Compression | None] | None:
    name = path.name.lower()
    return next((known for suffix, known in _SUFFIXES.items() if name.endswith(suffix)), None)


def _input_file(path: Path, text: str, base: Path) -> InputFile:
    name = _name(path, text, base)
    try:
        facts = path.stat()
    except OSError as error:
        if path.is_symlink():
            problem = f"{name}: a link to {path.readlink()}, which leads nowhere ({error.strerror}); mend or remove it"
            raise InputError(problem) from error
        raise
    if not stat.S_ISREG(facts.st_mode):
        raise InputError(f"{name}: not a regular file; the input is read twice, so give it as a file on disk")
    known = _format(path)
    assert known is not None  # _expand returns no other files
    return InputFile(path, name, *known, facts.st_size, facts.st_mtime_ns)


def _name(path: Path, text: str, base: Path) -> str:
    """Relative where that stays true when the job's folder moves; bytes that are no UTF-8 are spelled out.

    One name for one place, however it is written. Where `..` follows a link, that takes the file's real path.
    """
    plain = Path(os.path.normpath(path))
    if ".." in path.parts and _real(plain) != _real(path):
        plain = _real(path)
    root = Path(os.path.normpath(base))
    if plain.is_relative_to(root):
        plain = plain.relative_to(root)
    elif not Path(text).is_absolute():
        plain = Path(os.path.relpath(plain, root))
    return os.fsencode(plain.as_posix()).decode("utf-8", "backslashreplace")


def _why_nothing(text: str, base: Path, found: _Expansion) -> str:
    if found.wanted:
        return f"{text}: leads to this job's own output and nothing else; change output.path or input.path"
    if found.left_out:
        names = ", ".join(path.name for path in found.left_out[:3])
        return (
            f"{text}: all data files in it ({len(found.left_out)}: {names}) are left out, since their names "
            "or those of their folders begin with '_' or '.'; rename them, or name the files in input.path"
        )
    if (base / text).is_dir():
        return f"{text}: no data files in this folder; {_READABLE}"
    return f"{text}: no input files match; looked in {os.path.normpath(base)} ({_READABLE})"
