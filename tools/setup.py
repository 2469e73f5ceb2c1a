"""Set-up of a checkout: the virtual environment with the right vLLM for this machine, and the demo model.

Run by `make setup` with any Python from 3.11 on and nothing installed. Prints what it does. Does nothing, quickly, when
pyproject.toml and this file are the same as at the last time.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "bulkgen-setup"
# Builds of PyTorch for machines without a GPU, where the plain package index has none that fits.
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# vLLM's packages bring these along; for text models vLLM runs without them.
EXTRAS_OF_TORCH = ("torchvision", "torchaudio", "torchcodec")


def say(text: str) -> None:
    """One line about what happens."""
    print(f"setup: {text}", flush=True)


def main() -> int:
    """Bring the checkout up to date; the exit code is that of the first step that failed."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this file is what tells users of older Pythons
        sys.exit(
            f"setup: Python 3.11 or newer is needed, this is {sys.version.split()[0]}; try `make PYTHON=python3.12`"
        )
    if sys.platform != "linux":
        sys.exit(f"setup: vLLM runs on Linux, this is {sys.platform}; use a Linux machine or container")
    extra = "gpu" if has_gpu() else "cpu"
    wanted = fingerprint(extra)
    if STAMP.is_file() and STAMP.read_text() == wanted and PYTHON.exists():
        return 0
    say(f"Python {sys.version.split()[0]}, {'a GPU' if extra == 'gpu' else 'no GPU'}: installing bulkgen[{extra},dev]")
    make_environment()
    install(f"{ROOT}[{extra},dev]")
    heal_torchvision()
    say("preparing the demo model")
    run(str(PYTHON), "-m", "bulkgen", "demo-model")
    STAMP.write_text(wanted)
    say("done")
    return 0


def has_gpu() -> bool:
    """Whether NVIDIA's driver lists a GPU."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    listed = subprocess.run([smi, "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU " in listed.stdout


def fingerprint(extra: str) -> str:
    """What the environment depends on."""
    digest = hashlib.sha256(f"{extra} {sys.version} {ROOT}".encode())
    for file in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def make_environment() -> None:
    """Create .venv, unless it is there and works."""
    if PYTHON.exists() and subprocess.run([str(PYTHON), "-m", "pip", "--version"], capture_output=True).returncode == 0:
        return
    say(f"creating {VENV.name}")
    shutil.rmtree(VENV, ignore_errors=True)
    made = subprocess.run([sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        sys.exit(
            f"setup: cannot create {VENV}: {(made.stderr or made.stdout).strip().splitlines()[0]}; "
            "on Debian and Ubuntu: apt install python3-venv"
        )


def install(what: str) -> None:
    """Install in editable form: plainly first, and with PyTorch's CPU index only where that fails."""
    pip = [
        str(PYTHON),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
        "-e",
        what,
    ]
    if os.environ.get("BULKGEN_UV") and shutil.which("uv"):
        pip = ["uv", "pip", "install", "--python", str(PYTHON), "-e", what]
    say("this takes some minutes the first time" if not STAMP.exists() else "updating")
    quiet = [*pip, "-q"]
    if subprocess.run(quiet, check=False).returncode != 0:
        say("the plain install failed; trying again with PyTorch's index for CPU builds")
        run(*quiet, "--extra-index-url", PYTORCH_CPU_INDEX)


def heal_torchvision() -> None:
    """Remove builds of torchvision that clash with the installed torch: `import transformers` models break on them."""
    probe = "import importlib.util as u, sys; u.find_spec('torchvision') is None or __import__('torchvision')"
    tried = subprocess.run([str(PYTHON), "-c", probe], capture_output=True, text=True, check=False)
    if tried.returncode == 0:
        return
    reason = tried.stderr.strip().splitlines()[-1]
    say(f"torchvision does not import beside this torch ({reason}); removing it, text models run without")
    run(str(PYTHON), "-m", "pip", "uninstall", "-y", "-q", *EXTRAS_OF_TORCH)


def run(*command: str) -> None:
    """Run a step; end with its exit code if it fails."""
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        say(f"failed with exit code {code}: {' '.join(command)}")
        sys.exit(code)


if __name__ == "__main__":
    sys.exit(main())
