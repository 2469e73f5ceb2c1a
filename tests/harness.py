"""Jobs as a user writes them, run as a user runs them: in a process, from the command line."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq

# On the PYTHONPATH of a run under test: stops it at a place, or lets its stub engine end badly.
HOOK = Path(__file__).parent / "cases" / "hook"


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Job:
    """A job in a folder of its own."""

    folder: Path
    spec: Mapping[str, Any]

    @property
    def path(self) -> Path:
        return self.folder / "job.yaml"

    @property
    def output(self) -> Path:
        return self.folder / str(self.spec["output"]["path"])

    @property
    def run_folder(self) -> Path:
        if self.output.suffix == ".parquet":
            return self.output.with_name(self.output.name + ".bulkgen")
        return self.output / "_bulkgen"

    def run(self, *options: str, env: Mapping[str, str] | None = None) -> Ended:
        return bulkgen("run", str(self.path), *options, env=env)

    def start(self, *options: str) -> subprocess.Popen[str]:
        """The run as a background process in a session of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "bulkgen", "run", str(self.path), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=default_signals,
        )

    def rows(self) -> list[dict[str, Any]]:
        files = [self.output] if self.output.is_file() else sorted(self.output.glob("*.parquet"))
        return [row for file in files for row in pq.read_table(file, partitioning=None).to_pylist()]

    def manifest(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.run_folder / "manifest.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["record"] == kind]

    def failures(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = pq.read_table(self.run_folder / "failures.parquet").to_pylist()
        return rows

    def committed_keys(self) -> list[bytes]:
        """Row keys over all parts in the manifest."""
        parts = [self.run_folder / "parts" / part["name"] for part in self.manifest("part")]
        return [key for part in parts for key in pq.read_table(part, columns=["key"])["key"].to_pylist()]

    def processes(self) -> list[Path]:
        """Links of whoever has a file of the run open as standard output: replicas, and what they have started."""
        found = []
        for link in Path("/proc").glob("[0-9]*/fd/1"):
            try:
                if str(link.readlink()).startswith(str(self.run_folder)):
                    found.append(link)
            except OSError:
                continue
        return found

    def write(self, rows: Sequence[Any], name: str = "in.jsonl") -> None:
        """Write the input: a str is a line as it stands."""
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (self.folder / name).write_text("".join(line + "\n" for line in lines))


def default_signals() -> None:
    """As from a terminal, even where the tests run under nohup or as a shell's background job."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def bulkgen(*args: str, env: Mapping[str, str] | None = None) -> Ended:
    """The command line, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "bulkgen", *args],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **(env or {})},
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def assert_nobody_left(job: Job) -> None:
    """No replica of the run is left, nor what it started; they may take some seconds to end."""
    until = time.monotonic() + 10
    while (left := job.processes()) and time.monotonic() < until:
        time.sleep(0.02)
    assert not left


def load_tool(name: str) -> ModuleType:
    """A script of tools/, which is no package, as a module."""
    file = Path(__file__).parents[1] / "tools" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"checkout_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prompts(number: int) -> list[dict[str, Any]]:
    """Rows whose prompts differ in text and length."""
    return [{"id": f"r{i:04d}", "prompt": f"row {i} " + "word " * (i * 7 % 400), "extra": i} for i in range(number)]


def model_folder(folder: Path, chat_template: str | None) -> Path:
    """A model as far as planning needs one: a config and a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "row": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "unk_token": "<unk>"}
    if chat_template:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 128}))
    return folder
