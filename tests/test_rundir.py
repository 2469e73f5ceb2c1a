"""The run folder: one holder at a time, a manifest that is whole, files that exist whole or not at all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bulkgen.errors import HeldError, OutputError
from bulkgen.rundir import Manifest, RunDir, read_manifest, whole_file


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


def test_another_format_is_refused(run: RunDir) -> None:
    run.manifest.write_text('{"record":"format","format":99}\n')
    with pytest.raises(OutputError, match="format 99"):
        Manifest(run.manifest)


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
