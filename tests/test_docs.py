"""What the documents say of codes and commands, against the code itself."""

import re
from pathlib import Path

import pytest

from bulkgen.codes import ERRORS, WARNINGS
from bulkgen.records import EXTRA_COLUMNS, RESULT_COLUMNS
from tests.harness import bulkgen

ROOT = Path(__file__).parents[1]
FAULTS = (ROOT / "docs" / "faults.md").read_text()
README = (ROOT / "README.md").read_text()

# A code stands where a failure is made: as a text, or as the name of a constant of the same module.
_MADE = re.compile(r"(?:RowError|BadRow|Failure)\(\s*(?:[\w.]+,\s*)?(?:\"([a-z_0-9]+)\"|([A-Z_]{4,})\b)")


def codes() -> set[str]:
    """Codes of failed rows, and of warnings, which are constants that the part is written with."""
    sources = [path.read_text() for path in (ROOT / "bulkgen").rglob("*.py")]
    constants = {
        name: value for text in sources for name, value in re.findall(r"^_?([A-Z_]+) = \"([a-z_]+)\"", text, re.M)
    }
    found = {
        literal or constants.get(name.removeprefix("_"), name)
        for text in sources
        for literal, name in _MADE.findall(text)
    }
    parser = (ROOT / "bulkgen" / "dataset" / "json_rows.py").read_text()
    return found.union(re.findall(r"return \"(bad_[a-z0-9]+)\", ", parser))


def test_the_list_of_codes_is_whole() -> None:
    assert codes() == ERRORS


def test_every_code_of_a_failed_row_is_explained() -> None:
    assert sorted(code for code in ERRORS if f"`{code}`" not in FAULTS) == []


@pytest.mark.parametrize("code", sorted(WARNINGS))
def test_every_warning_is_explained(code: str) -> None:
    assert f"warning `{code}`" in FAULTS or f"or `{code}`)" in FAULTS


def test_every_column_is_explained() -> None:
    assert [column for column in (*RESULT_COLUMNS, *EXTRA_COLUMNS) if f"`{column}`" not in README] == []


def test_every_command_is_listed() -> None:
    told = bulkgen("--help", env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).out
    commands = re.findall(r"^\W*([a-z][a-z-]+) {2,}\S", told[told.index("Commands") :], re.M)
    assert {"run", "failures", "report"} <= {*commands}
    assert [command for command in commands if f"bulkgen {command} " not in README] == []
