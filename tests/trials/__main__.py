"""`python -m tests.trials kills|poison|disk`."""

import argparse

from tests.trials import disk, kills, poison


def main() -> None:
    """Run one trial."""
    parser = argparse.ArgumentParser(prog="python -m tests.trials", description="Trials on real vLLM, for minutes.")
    parser.add_argument("trial", choices=["kills", "poison", "disk"])
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    match given.trial:
        case "kills":
            kills.main(given.rows, given.kills, given.seed)
        case "poison":
            poison.main(given.rows)
        case "disk":
            disk.main(given.rows)


if __name__ == "__main__":
    main()
