"""Known vulnerabilities in what is installed in .venv, by pip-audit: `make audit`, a part of `make check`.

Fails for one that a newer version mends. One without a remedy is named and does not fail. Where the service that
knows vulnerabilities cannot be reached, one line says that nothing was looked at.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PIP_AUDIT = Path(sys.executable).with_name("pip-audit")
TIMEOUT_S = 300

# Vulnerabilities that have a remedy which cannot be taken, each with the reason.
ACCEPTED: dict[str, str] = {}


def main() -> int:
    """Returns 1 where there is something to be done."""
    command = [str(PIP_AUDIT), "--local", "--skip-editable", "--progress-spinner", "off", "--format", "json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        packages = json.loads(done.stdout)["dependencies"]
    except (OSError, subprocess.TimeoutExpired) as e:
        return skipped(str(e))
    except (ValueError, KeyError):
        return skipped((done.stderr.strip() or "pip-audit said nothing").splitlines()[-1][:200])
    known = [package for package in packages if "vulns" in package]
    if not known:
        return skipped(f"the package index tells nothing about any of {len(packages)} packages")
    return judged(known, len(packages))


def skipped(reason: str) -> int:
    """Nothing was looked at, which is no fault of the code."""
    print(f"audit: skipped: {reason}")
    return 0


def judged(packages: list[dict[str, Any]], of: int) -> int:
    """Names each vulnerability; 1 if one has a remedy that is not taken."""
    found = [(package, vulnerability) for package in packages for vulnerability in package["vulns"]]
    open_ones = 0
    for package, vulnerability in found:
        remedies = vulnerability["fix_versions"]
        reason = ACCEPTED.get(vulnerability["id"])
        what = f"mended by {', '.join(remedies)}" if remedies else "no version mends it yet"
        print(f"audit: {package['name']} {package['version']}: {vulnerability['id']}: {reason or what}")
        open_ones += bool(remedies) and reason is None
    print(f"audit: {len(packages)} of {of} packages looked at, {len(found)} vulnerabilities, {open_ones} to be mended")
    return 1 if open_ones else 0


if __name__ == "__main__":
    sys.exit(main())
