"""Public fault cases about the machine around a run: kills, signals, disks, places, pipes; whole runs, on the stub."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from bulkgen.report.model import Seconds
from bulkgen.rundir import FORMAT
from tests.harness import HOOK, Ended, Job, assert_nobody_left, bulkgen, default_signals

MakeJob = Callable[..., Job]

ROWS = [{"id": f"r{i:03d}", "prompt": f"row {i:03d} {'word ' * (i * 7 % 40)}"} for i in range(40)]
# Slow enough to be met in the middle, committed row by row or nearly so.
SLOW: dict[str, Any] = {
    "output": {"commit_rows": 4, "commit_s": 0.1},
    "engine": {"max_num_seqs": 4, "stub": {"step_s": 0.05}},
    "sampling": {"max_tokens": 20},
}
FAST = ("--set", "engine.stub.step_s=0")


# ---- a run in the background, and moments in it ----


class Begun:
    """A run in the background, told to wait at a place where that is wanted; reads nothing of it before its end."""

    def __init__(self, job: Job, *options: str, pause: str | None = None, env: dict[str, str] | None = None) -> None:
        self.job = job
        self.gate = job.folder / f"gate-{len(list(job.folder.glob('gate-*')))}"
        self.gate.mkdir()
        more = {} if pause is None else {"BULKGEN_TEST_PAUSE": f"{pause}:{self.gate}"}
        self.err = self.gate / "err"
        with self.err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "bulkgen", "run", str(job.path), *options],
                stdout=subprocess.PIPE,
                stderr=err,
                stdin=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
                preexec_fn=default_signals,
                env={**os.environ, "PYTHONPATH": str(HOOK), **more, **(env or {})},
            )

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for something to come true while the run lives."""
        end = time.monotonic() + 60
        while not condition():
            assert self.process.poll() is None, f"ended before {what}: {self.err.read_text()}"
            assert time.monotonic() < end, f"no {what} in a minute"
            time.sleep(0.01)

    def at_pause(self) -> "Begun":
        self.until((self.gate / "reached").exists, "the place to wait at")
        return self

    def go(self) -> None:
        (self.gate / "go").touch()

    def has_said(self, words: str) -> bool:
        return words in self.err.read_text()

    def ended(self) -> Ended:
        began = time.monotonic()
        out, _ = self.process.communicate(timeout=60)
        self.took_s = time.monotonic() - began
        return Ended(self.process.returncode, out, self.err.read_text())


def records(job: Job, kind: str) -> list[dict[str, Any]]:
    """Whole records of the manifest, also while a run works or after it was killed."""
    manifest = job.run_folder / "manifest.jsonl"
    lines = manifest.read_bytes().split(b"\n")[:-1] if manifest.exists() else []
    return [record for record in map(json.loads, lines) if record["record"] == kind]


def progress(job: Job) -> dict[str, Any]:
    """What a run shows of itself, nothing before it begins."""
    path = job.run_folder / "progress.json"
    shown: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return shown


def stage(job: Job) -> str:
    return str(progress(job).get("stage", ""))


def assert_whole(job: Job, rows: list[dict[str, Any]] = ROWS) -> None:
    """Each row once, in order, with its own answer; none committed twice; every part readable."""
    out = job.rows()
    assert [row["id"] for row in out] == [row["id"] for row in rows]
    assert all(row["text"] == f"echo:{row['prompt']}" for row in out)
    keys = job.committed_keys()
    assert len(keys) == len(set(keys)) == len(rows)
    assert {p.name for p in (job.run_folder / "parts").iterdir()} == {part["name"] for part in records(job, "part")}
    report = json.loads(bulkgen("report", str(job.output), "--json").out)["whole"]
    assert (report["outcome"], report["rows"], report["done"]) == ("finished", len(rows), len(rows))
    assert report["output_tokens"] == sum(row["output_tokens"] for row in out)


def assert_told(ended: Ended, code: int, *words: str) -> None:
    assert ended.code == code, ended.err
    assert "Traceback" not in ended.err
    for word in words:
        assert word in ended.err, ended.err


def assert_final_names_are_readable(job: Job) -> None:
    for path in [*job.folder.rglob("*.parquet")]:
        if path.is_file() and ".tmp-" not in str(path):
            pq.read_metadata(path)


# ---- places at which a run can be met ----

PLANNING = "bulkgen.plan.writer:PlanWriter.add:1"
PLANNED = "bulkgen.plan.writer:PlanWriter.finish:1"
A_COMMIT = "bulkgen.rundir:Manifest.append:6"  # after the format, start, plan, ready and a part
MERGE = "bulkgen.results.output:Output.write:1"
MERGED = "bulkgen.results.output:Output.finish:1"
REPORT = "bulkgen.report.files:write_reports:1"


def start_engine_for_ever(job: Job) -> Begun:
    """A run whose engine does not get ready, met while it loads."""
    run = Begun(job, "--set", "engine.stub.start_s=600")
    run.until(lambda: stage(job) == "starting" and job.processes(), "engine start")
    return run


def generating(job: Job) -> Begun:
    """A run in the middle: it has committed something, and more is to come."""
    before = len(records(job, "part"))
    run = Begun(job)
    run.until(lambda: len(records(job, "part")) > before, "commit")
    return run


# ---- 51, 59: kills and signals ----


def test_51_kill9_at_every_stage_and_resume(make_job: MakeJob) -> None:
    job = make_job(ROWS, **SLOW)
    meet: list[Callable[[], Begun]] = [
        lambda: Begun(job, pause=PLANNING).at_pause(),
        lambda: Begun(job, pause=PLANNED).at_pause(),
        lambda: start_engine_for_ever(job),
        lambda: generating(job),
        lambda: Begun(job, pause=A_COMMIT).at_pause(),
        lambda: generating(job),
        lambda: Begun(job, pause=MERGE).at_pause(),
        lambda: Begun(job, pause=MERGED).at_pause(),
        lambda: Begun(job, pause=REPORT).at_pause(),
    ]
    keys: set[bytes] = set()
    for number, begin in enumerate(meet):
        run = begin()
        run.process.kill()
        run.ended()
        assert_nobody_left(job)
        assert_final_names_are_readable(job)
        now = {k for part in records(job, "part") for k in keys_of(job.run_folder / "parts" / part["name"])}
        assert keys <= now
        keys = now
        if number == 3:
            # What else a crash leaves: a record half written, a part that is on no record, a lock of another machine.
            with (job.run_folder / "manifest.jsonl").open("ab") as file:
                file.write(b'{"record":"part","start":4,"na')
            parts = job.run_folder / "parts"
            shutil.copy(next(parts.glob("part-*.parquet")), parts / "part-s0004-r0-i0-000999.parquet")
            (parts / ".tmp-part-s0004-r0-i0-000998.parquet").write_bytes(b"half")
            (job.run_folder / "lock").write_text('{"pid": 1, "host": "elsewhere", "since": 1.0}')
        if number == 6:
            engines = len(records(job, "ready"))
            assert len(keys) == len(ROWS)
    assert job.run(*FAST).code == 0
    assert_whole(job)
    # The last steps were gone on with without an engine.
    assert len(records(job, "ready")) == engines


def keys_of(part: Path) -> list[bytes]:
    keys: list[bytes] = pq.read_table(part, columns=["key"])["key"].to_pylist()
    return keys


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_59_a_signal_at_every_stage(make_job: MakeJob, number: signal.Signals) -> None:
    job = make_job(ROWS, **SLOW)
    meet: list[tuple[str, Callable[[], Begun]]] = [
        (
            "0 of 40 rows are done and committed",
            lambda: Begun(job, pause="bulkgen.spec.loading:load_spec:1").at_pause(),
        ),
        ("0 of 40 rows are done and committed", lambda: Begun(job, pause=PLANNING).at_pause()),
        ("0 of 40 rows are done", lambda: start_engine_for_ever(job)),
        ("of 40 rows are done and committed", lambda: generating(job)),
        ("40 of 40 rows are done and committed", lambda: Begun(job, pause=MERGE).at_pause()),
    ]
    for words, begin in meet:
        run = begin()
        run.process.send_signal(number)
        run.until(lambda: run.has_said(f"{number.name}: stopping"), "answer")  # noqa: B023
        run.go()
        ended = run.ended()
        assert run.took_s < 10
        assert_told(ended, 75, f"stopped by {number.name}", "run the same command again to go on")
        if begin is not meet[0][1]:
            assert words in ended.err
            assert records(job, "end")[-1]["outcome"] == "stopped"
        assert ended.out == ""
        assert_nobody_left(job)
        assert_final_names_are_readable(job)
    assert job.committed_keys()
    assert job.run(*FAST).code == 0
    assert_whole(job)


def test_59_ctrl_c_twice_ends_at_once(make_job: MakeJob) -> None:
    job = make_job(ROWS, **SLOW)
    begins: list[Callable[[], Begun]] = [
        lambda: Begun(job, pause=PLANNING).at_pause(),
        lambda: start_engine_for_ever(job),
    ]
    for begin in begins:
        run = begin()
        for _ in range(2):
            run.process.send_signal(signal.SIGINT)
            if not run.has_said("once more to end at once"):
                run.until(lambda: run.has_said("once more to end at once"), "answer")  # noqa: B023
        assert run.ended().code == 75  # without having been let go on
        assert run.took_s < 5
        assert_nobody_left(job)
        assert_final_names_are_readable(job)
    assert job.run(*FAST).code == 0
    assert_whole(job)


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process would survive a signal, having a handler or ignoring it."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [int(re.search(rf"^{name}:\s*(\w+)", status, re.MULTILINE)[1], 16) for name in ("SigIgn", "SigCgt")]  # type: ignore[index]
    return bool((masks[0] | masks[1]) >> (number - 1) & 1)


def test_59_usr1_is_a_question_and_not_the_end(make_job: MakeJob) -> None:
    job = make_job(ROWS, **SLOW)
    run = Begun(job)
    run.until(lambda: catches(run.process.pid, signal.SIGUSR1), "handler")
    run.process.send_signal(signal.SIGUSR1)  # hardly begun
    run.until(lambda: run.has_said(" generating\n"), "generation")
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        run.process.send_signal(number)
    run.until(lambda: run.has_said("generating: "), "news")
    # Schedulers signal every process of a job; the driver alone decides.
    for link in job.processes():
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(int(link.parts[2]), number)
    ended = run.ended()
    assert ended.code == 0, ended.err
    assert re.search(
        r"^[\d-]+ [\d:]+ generating: \d+ of 40 rows \(0 failed\), .* tokens/s, .*ETA", ended.err, re.MULTILINE
    )
    assert not records(job, "restart")
    assert_whole(job)


# ---- 53: files that are not the run's ----


@pytest.mark.parametrize("content", ["empty", "torn", "whole", "other"])
def test_53_foreign_files_in_output_dir(make_job: MakeJob, content: str) -> None:
    job = make_job(ROWS, output={"path": "out/"})
    other = make_job(ROWS[:2], output={"path": "out/"})
    assert other.run().code == 0
    whole = (other.output / "part-00000.parquet").read_bytes()
    job.output.mkdir()
    name = "results.jsonl" if content == "other" else "part-00000.parquet"
    foreign = job.output / name
    foreign.write_bytes({"empty": b"", "torn": whole[:200], "whole": whole, "other": b'{"id": "r001"}\n'}[content])
    (job.output / ".part-00003.parquet.tmp").write_bytes(b"half")
    before = foreign.read_bytes()
    assert_told(job.run("--set", "engine.stub.start_s=600"), 6, name, "did not write", "output.path")
    assert foreign.read_bytes() == before
    assert not job.run_folder.exists()
    foreign.unlink()
    assert job.run(*FAST).code == 0
    assert_whole(job)
    # Put there later: what is not the run's is left alone, and never taken for it.
    (job.output / "results.jsonl").write_text("theirs\n")
    if content == "torn":
        (job.output / "part-00000.parquet").write_bytes(before)
        assert_told(job.run(), 6, "part-00000.parquet", "move it away")
        assert (job.output / "part-00000.parquet").read_bytes() == before
        (job.output / "part-00000.parquet").unlink()
    job.write([*ROWS, {"id": "new", "prompt": "x"}])
    assert job.run().code == 0
    assert [row["id"] for row in job.rows()] == [*(row["id"] for row in ROWS), "new"]
    assert (job.output / "results.jsonl").read_text() == "theirs\n"


# ---- 61: engines that do not end ----


@pytest.mark.parametrize("how", ["thread", "child", "shutdown"])
def test_61_hangs_at_exit(make_job: MakeJob, how: str) -> None:
    job = make_job(ROWS)
    run = Begun(job, env={"BULKGEN_TEST_LINGER": how})
    ended = run.ended()  # of standard output too: whoever waits on the pipe is released
    assert ended.code == 0, ended.err
    assert "died" not in ended.err
    assert ("did not end by itself and was ended" in ended.err) == (how != "child")
    assert ended.err.count("did not end") <= 1
    assert ended.out.splitlines()[-1] == f"output: {job.output}"
    assert_nobody_left(job)
    assert pq.read_table(job.run_folder / "report.parquet").num_rows == 2
    assert_whole(job)


# ---- 63: places that cannot be written to ----


@contextmanager
def mounted(place: Path, *options: str) -> Iterator[Path]:
    """A mount at a folder, or the test is skipped."""
    place.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *options, str(place)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def assert_refused_early(job: Job, output: str, *words: str) -> None:
    before = sorted(job.folder.rglob("*"))
    ended = job.run("--set", f"output.path={output}", "--set", "engine.stub.start_s=600")
    assert_told(ended, 6, output.rstrip("/").rsplit("/")[0], *words)
    assert sorted(job.folder.rglob("*")) == before


def test_63_output_not_writable(make_job: MakeJob) -> None:
    job = make_job(ROWS)
    (job.folder / "a_file").write_text("x")
    (job.folder / "taken.parquet").mkdir()
    (job.folder / "runs").mkdir()
    (job.folder / "runs" / "a.parquet.bulkgen").write_text("a file where the run folder belongs")
    for suffix in ("", ".parquet"):
        assert_refused_early(job, f"a_file/out{suffix}", "Not a directory")
        assert_refused_early(job, f"/proc/bulkgen-out{suffix}", "/proc")
    assert_refused_early(job, "taken.parquet", "is a folder")
    assert_refused_early(job, "runs/a.parquet", "a.parquet.bulkgen")
    assert_refused_early(job, f"{'x' * 250}.parquet", "File name too long")
    # A parent that is missing is made.
    assert job.run("--set", "output.path=missing/parent/out").code == 0
    assert (job.folder / "missing/parent/out/part-00000.parquet").exists()


def test_63_output_on_a_read_only_mount(make_job: MakeJob) -> None:
    job = make_job(ROWS)
    place = job.folder / "ro"
    place.mkdir()
    with mounted(place, "--bind", "-o", "ro", str(place)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(place)], check=True)
        assert_refused_early(job, "ro/out.parquet", "Read-only file system")
        assert_refused_early(job, "ro/out/", "Read-only file system")
        assert_refused_early(job, "ro/deep/er/out/", "Read-only file system")


# ---- 66: what a log file gets ----


def test_66_log_flood(make_job: MakeJob) -> None:
    rows = [{"id": i, "prompt": f"q {i}" if i % 5 else ""} for i in range(5000)]
    job = make_job(rows, engine={"max_num_seqs": 16, "stub": {"step_s": 0.004}}, output={"commit_rows": 50})
    run = Begun(job, "--for", "1h")
    run.until(lambda: run.has_said(" generating\n"), "generation")
    run.process.send_signal(signal.SIGUSR1)
    ended = run.ended()
    assert ended.code == 3, ended.err
    both = ended.err + ended.out
    assert not set(both) & {"\r", "\x1b"}
    assert len(both.splitlines()) < 200
    assert len(both) < 50_000
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in ended.err.splitlines())
    assert re.search(r"generating: [\d,]+ of 5,000 rows \(1,000 failed\), .*tokens/s.*ETA", ended.err)
    # Bad rows are summed up by reason, with an example.
    assert re.search(r"^ +1,000 +empty_prompt +\S", ended.out, re.MULTILINE)
    assert ended.out.count("empty_prompt") <= 3
    assert b"\r" not in (job.run_folder / "engine-0.log").read_bytes()


def test_66_a_terminal_gets_a_bar(make_job: MakeJob) -> None:
    job = make_job(ROWS, **SLOW)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    process = subprocess.Popen(
        [sys.executable, "-m", "bulkgen", "run", str(job.path)],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 1 << 16)
        except OSError:  # nobody has the other end any more
            break
    os.close(ours)
    assert process.wait(60) == 0
    assert b"\r" in shown
    assert b"generating" in shown
    assert b"output: " in shown.splitlines()[-1]


# ---- 67: exit codes and pipes ----


def test_67_exit_codes(make_job: MakeJob) -> None:
    ok, bad = {"id": 1, "prompt": "ok"}, {"id": 2, "prompt": ""}
    for rows, code, failed in (([ok, ok], 0, 0), ([ok, bad], 3, 1), ([bad, bad], 3, 2)):
        job = make_job(rows)
        assert job.run().code == code
        assert job.run().code == code  # a finished job, asked once more
        state = json.loads(bulkgen("status", str(job.output), "--json").out)
        whole = json.loads(bulkgen("report", str(job.output), "--json").out)["whole"]
        assert state["state"] == whole["outcome"] == "finished"
        assert state["failed"] + state["refused"] == whole["failed"] + whole["refused"] == failed
        assert records(job, "end")[-1]["exit_code"] == code
    assert job.run("--no-such-option").code == 2
    assert job.run("--set", "sampling.temperatur=1").code == 2
    assert job.run("--set", "input.path=nothing-here.jsonl").code == 6
    all_bad = make_job([{"id": i, "prompt": ""} for i in range(200)])
    assert all_bad.run().code == 6
    assert all_bad.run("--max-failures", "100%").code == 3


def shell(command: str, env: dict[str, str] | None = None) -> Ended:
    """A line of bash; the code is that of the pipe's first command."""
    bash = ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(bash, capture_output=True, text=True, env=env, cwd="/", check=False)
    return Ended(done.returncode, done.stdout, done.stderr)


def test_67_a_closed_pipe(make_job: MakeJob) -> None:
    job = make_job([*ROWS, {"id": "bad", "prompt": ""}], engine={"max_num_seqs": 4, "stub": {"step_s": 0.002}})
    me, out = f"{sys.executable} -m bulkgen", job.output
    ended = shell(f"{me} run {job.path} | head -1")
    assert ended.code == 3, ended.err
    assert "Traceback" not in ended.err
    assert len(job.rows()) == 41
    assert shell(f"{me} run {job.path} 2>&1 | true").code == 3
    for look in ("report", "report --json", "status", "status --json", "failures", "failures --json", "failures -n 99"):
        ended = shell(f"{me} {look} {out} | head -1")
        assert (ended.code, ended.err) == (0, ""), look
        assert ended.out.strip()
        assert (shell(f"{me} {look} {out} | true").code, ended.err) == (0, ""), look


def test_67_crons_bare_environment(make_job: MakeJob) -> None:
    job = make_job([{"id": "ä", "prompt": "größe \U0001f600"}, {"id": "b", "prompt": ""}], output={"path": "aus gäbe/"})
    bare = f"env -i LC_ALL=C {sys.executable} -m bulkgen"
    ended = shell(f"{bare} run '{job.path}' <&- >&- 2>&-")
    assert (ended.code, ended.out, ended.err) == (3, "", "")
    assert job.rows()[0]["text"] == "echo:größe \U0001f600"
    for look in ("status", "report", "failures", "failures --json"):
        ended = shell(f"{bare} {look} '{job.output}' <&-")
        assert (ended.code, ended.err) == (0, ""), look
        assert ended.out
    assert shell(f"{bare} run '{job.path}' <&-").code == 3
    assert shell(f"{bare} run '{job.folder}/none.yaml' <&- >&- 2>&-").code == 2


# ---- places that change while a run works ----


@pytest.mark.parametrize("output", ["out.parquet", "out/"])
def test_output_removed_while_running(make_job: MakeJob, output: str) -> None:
    job = make_job(ROWS, **{**SLOW, "output": {**SLOW["output"], "path": output}})
    run = generating(job)
    gone = job.run_folder if output == "out.parquet" else job.output
    while gone.exists():  # the run may be putting a file in it at this moment
        shutil.rmtree(gone, ignore_errors=True)
    assert_told(run.ended(), 6, str(job.output))
    assert_nobody_left(job)
    assert job.run(*FAST).code == 0
    assert_whole(job)


@pytest.mark.parametrize("how", ["removed", "replaced", "cut", "longer"])
def test_manifest_altered_while_running(make_job: MakeJob, how: str) -> None:
    job = make_job(ROWS, **SLOW)
    run = generating(job)
    manifest = job.run_folder / "manifest.jsonl"
    if how == "removed":
        manifest.unlink()
    elif how == "replaced":
        copy = manifest.with_name("copy")
        shutil.copy(manifest, copy)
        copy.rename(manifest)
    elif how == "cut":
        os.truncate(manifest, 10)
    else:
        with manifest.open("ab") as file:
            file.write(b'{"by": "another"}\n')
    expected = "was removed or replaced while the run worked" if how in ("removed", "replaced") else "was changed by"
    assert_told(run.ended(), 6, "manifest.jsonl", expected)
    assert_nobody_left(job)


def test_part_altered_while_running(make_job: MakeJob) -> None:
    job = make_job(ROWS, **SLOW)
    run = Begun(job, *FAST, pause="bulkgen.results.output:Output.__init__:1").at_pause()
    part = job.run_folder / "parts" / records(job, "part")[0]["name"]
    whole = part.read_bytes()
    part.write_bytes(whole[: len(whole) // 2])
    run.go()
    assert_told(run.ended(), 6, part.name, "restore it from a copy")
    assert not job.output.exists()
    part.write_bytes(whole)
    assert job.run(*FAST).code == 0
    assert_whole(job)


def test_output_made_read_only_while_running(make_job: MakeJob) -> None:
    job = make_job(ROWS, **{**SLOW, "output": {**SLOW["output"], "path": "out/"}})
    run = generating(job)
    with mounted(job.output, "--bind", str(job.output)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(job.output)], check=True)
        assert_told(run.ended(), 6, "Read-only file system")
        assert_nobody_left(job)
        assert_told(job.run(), 6, "Read-only file system")
    assert job.run(*FAST).code == 0
    assert_whole(job)


def fill(place: Path) -> Path:
    """Take all room that is left on a file system."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue
    return filler


def test_disk_full_at_each_stage(make_job: MakeJob) -> None:
    job = make_job(ROWS, **{**SLOW, "output": {**SLOW["output"], "path": "disk/out.parquet"}})
    with mounted(job.folder / "disk", "-t", "tmpfs", "-o", "size=4m", "tmpfs") as disk:
        begins: list[Callable[[], Begun]] = [
            lambda: Begun(job, pause=PLANNING).at_pause(),
            lambda: generating(job),
            lambda: Begun(job, pause=MERGE).at_pause(),
            lambda: Begun(job, pause=REPORT).at_pause(),
        ]
        for begin in begins:
            run = begin()
            filler = fill(disk)
            run.go()
            assert_told(run.ended(), 6, "No space left on device")
            assert_nobody_left(job)
            assert not [p for p in disk.rglob(".tmp-*") if p.is_file()]
            filler.unlink()
            assert_final_names_are_readable(job)
        filler = fill(disk)
        assert_told(job.run("--set", "name=again"), 6, "No space left on device")
        filler.unlink()
        assert job.run(*FAST).code == 0
        assert_whole(job)


# ---- what else a machine does ----


@pytest.mark.parametrize("number", [1, FORMAT - 1, FORMAT + 1])
def test_run_folder_of_another_format(make_job: MakeJob, number: int) -> None:
    job = make_job(ROWS)
    assert job.run().code == 0
    manifest = job.run_folder / "manifest.jsonl"
    manifest.write_text(manifest.read_text().replace(f'"format":{FORMAT}', f'"format":{number}', 1))
    before = {path: path.read_bytes() for path in job.folder.rglob("*") if path.is_file()}
    for command, place in (("run", job.path), ("status", job.output), ("report", job.output), ("failures", job.output)):
        words = f"written in format {number}, this bulkgen reads format {FORMAT}; choose another output.path"
        assert_told(bulkgen(command, str(place)), 6, words)
    assert {path: path.read_bytes() for path in before if path.name != "lock"} == {
        path: content for path, content in before.items() if path.name != "lock"
    }
    shutil.rmtree(job.run_folder)
    job.output.unlink()
    assert job.run(*FAST).code == 0
    assert_whole(job)


def test_two_runs_at_once(make_job: MakeJob) -> None:
    job = make_job(ROWS, **SLOW)
    (job.folder / "link").symlink_to(job.folder)
    run = Begun(job, "--set", "engine.stub.start_s=600")
    run.until(lambda: stage(job) == "starting", "engine start")
    for spelled in ("out.parquet", "./x/../out.parquet", "link/out.parquet"):
        ended = job.run("--set", f"output.path={spelled}")
        assert_told(ended, 5, f"held by process {run.process.pid}")
    run.process.terminate()
    assert run.ended().code == 75
    assert job.run(*FAST).code == 0
    assert_whole(job)


def test_a_clock_that_was_set_back(make_job: MakeJob) -> None:
    job = make_job(ROWS, **SLOW)
    run = generating(job)
    run.process.terminate()
    assert run.ended().code == 75
    # As if the first start had been in the future, and the clock been put right amid it.
    for name in ("manifest.jsonl", "timeline.jsonl"):
        path = job.run_folder / name
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for i, line in enumerate(lines):
            for key in ("time", "first_offered_at", "last_completed_at"):
                if line.get(key) is not None:
                    line[key] += 86400.0 - 600.0 * i
        path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    (job.run_folder / "lock").write_text(json.dumps({"pid": 1, "host": "x", "since": time.time() + 1e6}))
    for look in ("status", "report"):
        shown = bulkgen(look, str(job.output))
        assert (shown.code, shown.err) == (0, "")
        assert not re.search(r"(?<![\w-])-\d", re.sub(r"\d{4}-\d\d-\d\d", "", shown.out)), shown.out
    assert job.run(*FAST).code == 0
    assert_whole(job)
    numbers = json.loads(bulkgen("report", str(job.output), "--json").out)
    for section in (numbers["whole"], *numbers["starts"]):
        assert all(section[field.name] >= 0 for field in fields(Seconds))


def test_an_input_that_changes_amid_the_merge(make_job: MakeJob) -> None:
    job = make_job(ROWS, **SLOW)
    run = Begun(job, *FAST, pause=MERGE).at_pause()
    other = [*reversed(ROWS)]
    job.write(other)
    run.go()
    assert_told(run.ended(), 75, "the input changed while the job ran")
    assert not job.output.exists()
    assert job.run(*FAST).code == 0
    assert_whole(job, other)


def test_kills_are_no_attempts_that_an_engine_failed(make_job: MakeJob) -> None:
    job = make_job(ROWS[:4], engine={"stub": {"step_s": 1.0}})
    for _ in range(3):
        run = Begun(job)
        run.until(lambda: progress(job).get("running"), "rows in the engine")
        run.process.kill()
        run.ended()
        (job.run_folder / "progress.json").unlink()
    assert job.run(*FAST, "--set", "engine.stub.flaky_rate=1.0").code == 0
    assert all(row["attempts"] > 3 for row in job.rows())
