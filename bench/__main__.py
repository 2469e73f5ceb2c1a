"""`python -m bench [NAME...]`: run benchmarks and keep their tables in bench/results/ as Parquet and Markdown."""

import sys
from collections.abc import Callable
from typing import Any

from bench import commands, driver, kv, outcome, peers, scale
from bench.table import keep

BENCHES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "commands": commands.measure,
    "scale": scale.measure,
    "outcome": outcome.measure,
    "kv": kv.measure,
    "driver": driver.measure,
    "peers": peers.measure,
}


def main() -> int:
    """Run the named benchmarks, or all."""
    names = sys.argv[1:] or list(BENCHES)
    if unknown := set(names) - BENCHES.keys():
        print(f"bench: no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    for name in names:
        print(f"## {name}\n", flush=True)
        print(keep(name, BENCHES[name]()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
