"""The run folder: one holder at a time, a manifest that is whole, files that exist whole or not at all."""

import errno
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bulkgen.errors import HeldError, OutputError
from bulkgen.rundir import FORMAT, Manifest, RunDir, RunLog, read_manifest, whole_file


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.of_output(tmp_path / "out.parquet")
    run.create()
    return run


def test_the_run_folder_lies_beside_a_file_and_inside_a_folder(tmp_path: Path) -> None:
    assert RunDir.of_output(tmp_path / "a.parquet").path == tmp_path / "a.parquet.bulkgen"
    assert RunDir.of_output(tmp_path / "a").path == tmp_path / "a" / "_bulkgen"


def test_locate_takes_the_output_or_the_run_folder(run: RunDir, tmp_path: Path) -> None:
    Manifest(run.manifest).close()
    assert RunDir.locate(tmp_path / "out.parquet").path == run.path
    assert RunDir.locate(run.path).path == run.path
    with pytest.raises(OutputError, match="no bulkgen run here"):
        RunDir.locate(tmp_path / "other.parquet")


def test_a_second_holder_is_told_who_the_first_is(run: RunDir) -> None:
    with run.held():
        assert run.is_held()
        with pytest.raises(HeldError, match=r"held by process \d+ on .* since"), run.held():
            pass
    assert not run.is_held()


def test_the_lock_dies_with_its_process(run: RunDir) -> None:
    code = f"""
import os, signal
from pathlib import Path
from bulkgen.rundir import RunDir
with RunDir(Path({str(run.path)!r})).held():
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    with run.held():
        pass


def test_a_torn_last_record_does_not_count_and_is_cut_off(run: RunDir) -> None:
    manifest = Manifest(run.manifest)
    manifest.append({"record": "start", "start": 1})
    manifest.close()
    with run.manifest.open("ab") as f:
        f.write(b'{"record":"part","na')
    assert [r["record"] for r in read_manifest(run.manifest)] == ["format", "start"]
    again = Manifest(run.manifest)
    again.append({"record": "start", "start": 2})
    again.close()
    assert [r.get("start") for r in read_manifest(run.manifest)] == [None, 1, 2]


def test_a_record_that_does_not_fit_the_disk_leaves_no_half_behind(run: RunDir) -> None:
    code = f"""
import resource
from pathlib import Path
from bulkgen.errors import OutputError
from bulkgen.rundir import Manifest, read_manifest
path = Path({str(run.manifest)!r})
manifest = Manifest(path)
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, resource.RLIM_INFINITY))
try:
    manifest.append({{"record": "start", "start": 1}})
except OutputError as e:
    assert "cannot append" in str(e), e
else:
    raise AssertionError("no error")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
manifest.append({{"record": "start", "start": 2}})
assert [r.get("start") for r in read_manifest(path)] == [None, 2]
assert [r.get("start") for r in manifest.records] == [None, 2]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_damage_before_the_end_is_an_error_that_names_the_line(run: RunDir) -> None:
    Manifest(run.manifest).close()
    with run.manifest.open("ab") as f:
        f.write(b"\x00\x00\n" + json.dumps({"record": "end"}).encode() + b"\n")
    with pytest.raises(OutputError, match=r"manifest.jsonl:2: damaged"):
        read_manifest(run.manifest)


@pytest.mark.parametrize("number", [1, 2, 99, '"2"', "null"])
def test_another_format_is_refused_with_what_to_do(run: RunDir, number: object) -> None:
    run.manifest.write_text(f'{{"record":"format","format":{number}}}\n')
    with pytest.raises(OutputError, match=rf"format .*, this bulkgen reads format {FORMAT}; choose another output"):
        Manifest(run.manifest)
    with pytest.raises(OutputError, match="or remove the run folder and the output to begin anew"):
        read_manifest(run.manifest)


def test_a_file_that_fails_half_way_is_not_there(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    target.write_text("old")

    def fail_half_way() -> None:
        with whole_file(target) as path:
            path.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
    with whole_file(target) as path:
        path.write_text("new")
    assert target.read_text() == "new"


def test_an_output_that_cannot_be_written_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"file/out.parquet.bulkgen.*Not a directory"):
        RunDir.of_output(tmp_path / "file" / "out.parquet").create()


def test_what_cannot_be_made_whole_leaves_nothing_behind(tmp_path: Path) -> None:
    long = tmp_path / "a" / "b" / ("x" * 250)  # a name that fits; with the run folder's suffix it does not
    with pytest.raises(OutputError, match="File name too long"):
        RunDir.of_output(long.with_suffix(".parquet")).create()
    assert list(tmp_path.iterdir()) == []


# ---- who may look into it, and where what is written goes ----


def rights(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0o002)
    yield
    os.umask(before)


def fill(run: RunDir) -> None:
    """Write one file of each sort."""
    with run.held(), run.kept_private():
        run.plan.mkdir(exist_ok=True)
        (run.plan / "keys.bin").write_bytes(b"x")
        Manifest(run.manifest).close()
    RunLog(run.log).write("said", text="x")
    run.show("{}")
    run.engine_log(0)
    with whole_file(run.parts / "part.parquet") as path:
        path.write_bytes(b"x")


@pytest.mark.usefixtures("open_umask")
def test_a_run_folder_is_its_owners_alone(tmp_path: Path) -> None:
    run = RunDir.of_output(tmp_path / "new" / "out.parquet")
    run.create()
    fill(run)
    assert rights(tmp_path / "new") == 0o775
    for path in (run.path, *run.path.rglob("*")):
        assert rights(path) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_one_of_another_user_is_refused_unless_others_may_look(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "out.parquet.bulkgen")
    run.path.mkdir(0o777)
    os.chown(run.path, 65534, 65534)
    with pytest.raises(OutputError, match=r"belongs to another user \(number 65534\)"):
        run.create()
    assert list(run.path.iterdir()) == []
    run.create(private=False)


@pytest.mark.usefixtures("open_umask")
def test_one_that_is_not_private_follows_the_umask(tmp_path: Path) -> None:
    run = RunDir.of_output(tmp_path / "out.parquet")
    run.create(private=False)
    fill(run)
    for path in (run.path, *run.path.rglob("*")):
        assert rights(path) == (0o775 if path.is_dir() else 0o664), path


@pytest.mark.usefixtures("open_umask")
def test_a_folder_that_was_open_is_closed_and_a_stricter_one_is_left(tmp_path: Path) -> None:
    run = RunDir.of_output(tmp_path / "out.parquet")
    run.create(private=False)
    fill(run)
    run.log.chmod(0o400)
    run.create()
    assert rights(run.path) == 0o700
    assert rights(run.parts / "part.parquet") == 0o600
    assert rights(run.log) == 0o400
    run.create(private=False)
    assert rights(run.path) == 0o700
    assert rights(run.manifest) == 0o600


@pytest.mark.parametrize(
    "name",
    [
        "manifest.jsonl",
        "lock",
        "run.log",
        "engine-0.log",
        "parts",
        "plan",
        "parts/part-s0001-r0-i0-000000.parquet",
        "x",
    ],
)
@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_in_the_folder_is_not_followed(run: RunDir, tmp_path: Path, name: str, dangling: bool) -> None:
    target = tmp_path / "precious"
    if not dangling:
        target.write_text("precious")
    if name == "parts":
        run.parts.rmdir()
    (run.path / name).symlink_to(target)
    with pytest.raises(OutputError, match=r"is a symbolic link, and bulkgen writes to none in a run folder; remove it"):
        run.create()
    assert not target.exists() if dangling else target.read_text() == "precious"


def test_a_pipe_in_the_folder_is_not_waited_for(run: RunDir) -> None:
    os.mkfifo(run.log)
    with pytest.raises(OutputError, match="neither a file nor a folder"):
        run.create()


def test_a_link_that_comes_later_is_not_followed_either(run: RunDir, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    for path in (run.manifest, run.lock, run.log, run.progress.with_suffix(".tmp"), run.parts / ".tmp-part.parquet"):
        path.unlink(missing_ok=True)
        path.symlink_to(target)
    with pytest.raises(OutputError, match="manifest"):
        Manifest(run.manifest)
    with pytest.raises(OutputError, match="lock"), run.held():
        pass
    RunLog(run.log).write("said", text="x")
    run.show("{}")
    with whole_file(run.parts / "part.parquet") as path:
        path.write_text("x")
    assert target.read_text() == "precious"
    assert (run.parts / "part.parquet").read_text() == "x"
    assert json.loads(run.progress.read_text()) == {}


def test_a_run_folder_may_itself_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    run = RunDir.of_output(tmp_path / "out.parquet")
    run.path.symlink_to(tmp_path / "scratch")
    run.create()
    Manifest(run.manifest).close()
    assert (tmp_path / "scratch" / "manifest.jsonl").exists()


def test_a_lock_that_tells_of_another_machine_or_boot_is_no_obstacle(run: RunDir) -> None:
    run.lock.write_text('{"pid": 1, "host": "elsewhere", "since": 1.0}')
    assert not run.is_held()
    with run.held():
        pass
    run.lock.write_bytes(b"\x00" * 40)
    with run.held(), pytest.raises(HeldError, match="held by"), run.held():
        pass


def test_any_text_can_be_put_on_record_and_drives_no_terminal(run: RunDir) -> None:
    text = "half \ud800, \x1b[2J, \u202e, \u2028, \x9b, größe"
    manifest = Manifest(run.manifest)
    manifest.append({"record": "end", "message": text})
    manifest.close()
    RunLog(run.log).write("said", text=text)
    assert read_manifest(run.manifest)[-1]["message"] == text
    for path in (run.manifest, run.log):
        assert path.read_bytes().isascii()
        assert b"\x1b" not in path.read_bytes()


def test_temporaries_are_what_is_under_way_and_nothing_else(run: RunDir) -> None:
    run.plan.mkdir()
    left = [run.path / ".tmp-job.yaml", run.parts / ".tmp-part-s0001-r0-i0-000001.parquet", run.plan / ".tmp-rows"]
    for path in (*left, run.path / "notes.txt", run.parts / "part-s0001-r0-i0-000000.parquet", run.plan / "rows.arrow"):
        path.write_bytes(b"x")
    assert sorted(run.temporaries()) == sorted(left)


@pytest.mark.parametrize("nameless", [True, False])
def test_writing_is_tried_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nameless: bool) -> None:
    really = os.open

    def without_nameless(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if not nameless and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not here", str(path))
        return really(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", without_nameless)
    run = RunDir.of_output(tmp_path / "out.parquet")
    left = tmp_path / f".tmp-probe-{os.getpid()}"
    left.write_bytes(b"of a killed process with the same number")
    run.create()
    assert left.exists() == nameless
    assert list(run.path.glob(".tmp-*")) == []


def test_a_folder_that_takes_no_named_probe_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.open

    def full(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not here", str(path))
        if ".tmp-probe-" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return really(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(OutputError, match=r"cannot write the run folder .*No space left on device"):
        RunDir.of_output(tmp_path / "out.parquet").create()
    assert list(tmp_path.iterdir()) == []
