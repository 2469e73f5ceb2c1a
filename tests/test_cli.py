"""The command line itself: what it loads, what it documents, that the examples are true."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bulkgen.spec import load_spec
from tests.harness import bulkgen

ROOT = Path(__file__).parent.parent
COMMANDS = ["run", "plan", "tune", "render", "status", "report", "failures", "schema", "demo-model"]

IMPORTS = """
import atexit, json, sys
atexit.register(lambda: print("MODULES", json.dumps([m for m in sys.modules if "." not in m]), file=sys.stderr))
sys.argv = ["bulkgen", *json.loads(sys.argv[1])]
from bulkgen.cli import main
main()
"""


def modules_of(*args: str) -> set[str]:
    """The top-level modules that a command has loaded at its end."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, json.dumps(args)], capture_output=True, text=True, check=False
    )
    line = next(x for x in done.stderr.splitlines() if x.startswith("MODULES "))
    return set(json.loads(line.removeprefix("MODULES ")))


HEAVY = {"torch", "vllm", "ray"}


def test_help_loads_nothing_that_takes_time() -> None:
    assert not modules_of("--help") & {*HEAVY, "pyarrow", "polars", "transformers", "pydantic", "numpy", "jinja2"}


@pytest.mark.parametrize("job", ["stub", "demo"])
def test_a_finished_job_loads_neither_torch_nor_vllm(tmp_path: Path, job: str) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "job.yaml").write_text(
        f"name: x\nmodel: {job}\ninput: {{path: in.jsonl, prompt: prompt}}\n"
        "output: {path: out.parquet}\nengine: {kind: stub, max_model_len: 512}\n"
    )
    assert not modules_of("plan", str(tmp_path / "job.yaml")) & HEAVY
    first = modules_of("run", str(tmp_path / "job.yaml"))
    again = modules_of("run", str(tmp_path / "job.yaml"))
    assert not (first | again) & HEAVY
    assert "transformers" not in again
    for command in ("status", "report"):
        assert not modules_of(command, str(tmp_path / "out.parquet")) & {*HEAVY, "transformers"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_stands_in_the_readme(command: str) -> None:
    assert re.search(rf"^.*\b{command}\b.*$", bulkgen("--help").out, re.MULTILINE)
    shown = bulkgen(command, "--help")
    assert shown.code == 0
    assert f"bulkgen {command}" in (ROOT / "README.md").read_text()


def test_exit_codes_stand_in_the_help() -> None:
    text = re.sub(r"\s+", " ", bulkgen("--help").out)
    for code in (0, 1, 2, 3, 4, 5, 6, 75):
        assert re.search(rf"\b{code} ", text)


@pytest.mark.parametrize("path", sorted(ROOT.glob("jobs/*.yaml")), ids=lambda p: p.name)
def test_example_jobs_load(path: Path) -> None:
    spec = load_spec(path)
    assert spec.name == path.stem
    for name in spec.input.paths:
        assert (spec.base / name).exists()


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*.yaml")), ids=lambda p: p.name)
def test_engine_configs_load_and_give_a_reason_a_line(path: Path) -> None:
    load_spec(ROOT / "jobs/summaries.yaml", [f"engine.config={path}"])
    for line in path.read_text().splitlines():
        assert line.startswith("#") or line == "env:" or "  # " in line, line


def test_the_spec_of_the_readme_loads(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        (tmp_path / "job.yaml").write_text(block)
        load_spec(tmp_path / "job.yaml", ["engine.config=null"])


def test_schema_is_json_schema_with_all_sections() -> None:
    schema = json.loads(bulkgen("schema").out)
    assert set(schema["properties"]) >= {"name", "model", "input", "sampling", "output", "engine", "shards", "price"}
    assert schema["additionalProperties"] is False


def test_version() -> None:
    assert re.fullmatch(r"bulkgen \d+\.\d+\.\d+\n", bulkgen("--version").out)


def test_a_closed_pipe_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m bulkgen schema | head -1", shell=True, capture_output=True, text=True, check=False
    )
    assert done.stdout == "{\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("shell", "code"),
    [("| head -1", 3), ("| true", 3), ("2>&1 | true", 3), (">/dev/full", 3), ("2>&-", 3), (">&- 2>&-", 3)],
)
def test_who_does_not_listen_changes_no_exit_code(tmp_path: Path, shell: str, code: int) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n{"prompt": null}\n')
    (tmp_path / "job.yaml").write_text(
        "name: x\nmodel: stub\ninput: {path: in.jsonl, prompt: prompt}\noutput: {path: out.parquet}\n"
        "engine: {kind: stub}\n"
    )
    command = f"{sys.executable} -m bulkgen run {tmp_path}/job.yaml {shell}; echo ${{PIPESTATUS[0]}} >{tmp_path}/code"
    subprocess.run(["bash", "-c", command], capture_output=True, check=False)
    assert (tmp_path / "code").read_text().strip() == str(code)
    assert (tmp_path / "out.parquet").exists()


def test_a_bare_environment_is_enough(tmp_path: Path) -> None:
    job = ROOT / "jobs/stub.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "bulkgen", "run", "-q", str(job), "--set", f"output.path={tmp_path}/out"],
        env={"PATH": os.environ["PATH"]},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
