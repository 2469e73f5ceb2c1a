"""Set-up of a checkout: the virtual environment with the right vLLM for this machine, and the demo model.

Run by `make setup` with nothing installed but a Python; one that vLLM does not support looks for one that it does.
Prints what it does. Does nothing, quickly, when pyproject.toml and this file are the same as at the last time.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "bulkgen-setup"
# What vLLM 0.32 supports, the one with the most packages first.
PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14))
MACHINES = ("x86_64", "aarch64")
# Builds of PyTorch for machines without a GPU, where the plain package index has none that fits.
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# vLLM's packages bring these along; for text models vLLM runs without them.
EXTRAS_OF_TORCH = ("torchvision", "torchaudio", "torchcodec")


def say(text: str) -> None:
    """One line about what happens."""
    print(f"setup: {text}", flush=True)


def main() -> int:
    """Bring the checkout up to date; the exit code is that of the first step that failed."""
    if platform.system() != "Linux" or platform.machine() not in MACHINES:
        this = f"{platform.system()} on {platform.machine()}"
        sys.exit(f"setup: vLLM is built for Linux on {' and '.join(MACHINES)}, this is {this}; use such a machine")
    if sys.version_info[:2] not in PYTHONS:
        continue_with_other_python()
    extra = "gpu" if has_gpu() else "cpu"
    wanted = fingerprint(extra)
    if STAMP.is_file() and STAMP.read_text() == wanted and PYTHON.exists():
        return 0
    say(f"Python {sys.version.split()[0]}, {'a GPU' if extra == 'gpu' else 'no GPU'}: installing bulkgen[{extra},dev]")
    say("updating" if STAMP.exists() else "this takes some minutes the first time")
    STAMP.unlink(missing_ok=True)  # from here on the environment is neither the old nor the new one
    make_environment()
    install(extra)
    heal_torchvision()
    say("preparing the demo model")
    run(str(PYTHON), "-m", "bulkgen", "demo-model")
    STAMP.write_text(wanted)
    say("done")
    return 0


def continue_with_other_python() -> None:
    """Replace this process by one of a supported Python, where there is one; end with a sentence otherwise."""
    oldest, newest = (".".join(map(str, PYTHONS[i])) for i in (0, -1))
    for major, minor in PYTHONS:
        found = shutil.which(f"python{major}.{minor}")
        # Version managers put names on the path that do not run.
        if found and subprocess.call([found, "-c", ""], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0:
            os.execv(found, [found, *sys.argv])
    sys.exit(
        f"setup: Python {oldest} to {newest} is needed, this is {platform.python_version()} and no other was found; "
        "install one, or name it: make setup PYTHON=/path/to/python3"
    )


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
            f"setup: cannot create {VENV}: {' '.join((made.stderr + made.stdout).split())[:300]}; "
            "where ensurepip is missing, as on Debian and Ubuntu: apt install python3-venv"
        )


def install(extra: str) -> None:
    """Install in editable form; without a GPU, PyTorch's CPU index helps out where the plain install fails."""
    if os.environ.get("BULKGEN_UV") and shutil.which("uv"):
        # uv by itself would take whatever PyTorch's index also has from there, in whatever version.
        pip = ["uv", "pip", "install", "--python", str(PYTHON), "--index-strategy", "unsafe-best-match"]
    else:
        pip = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    command = [*pip, "-q", "-e", f"{ROOT}[{extra},dev]"]
    if extra == "gpu":
        run(*command)  # never with that index: to pip, a CPU build is the newer version of the same torch
    elif subprocess.run(command, check=False).returncode != 0:
        say("the plain install failed; trying again with PyTorch's index for CPU builds")
        run(*command, "--extra-index-url", PYTORCH_CPU_INDEX)


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
