"""The checks themselves: whatever is done to the files of a finished run, they notice it."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.faults.checks import Broken, Ended, Watch
from tests.faults.drive import run_schedule
from tests.faults.schedule import Schedule, Start, make_schedule

_FINISHED = Ended(code=3, err="", fired=(), sets={}, wall_s=1.0, ended_at=1.0)


def _swap(table: pa.Table, column: str) -> pa.Table:
    """The first two done rows with each other's values in a column."""
    values = table.column(column).to_pylist()
    a, b = [i for i, status in enumerate(table.column("status").to_pylist()) if status == "done"][:2]
    values[a], values[b] = values[b], values[a]
    place = table.column_names.index(column)
    return table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))


def _rewrite(change: Callable[[pa.Table], pa.Table]) -> Callable[[Watch], None]:
    return lambda watch: pq.write_table(change(pq.read_table(watch.output)), watch.output)


def _double_a_part(watch: Watch) -> None:
    manifest = watch.run / "manifest.jsonl"
    lines = manifest.read_bytes().splitlines(keepends=True)
    manifest.write_bytes(b"".join(lines) + next(line for line in lines if b'"record":"part"' in line))


def _parts(watch: Watch) -> list[Path]:
    return sorted((watch.run / "parts").glob("part-*"))


MISDEEDS: dict[str, Callable[[Watch], object]] = {
    "a row is dropped": _rewrite(lambda table: table.slice(1)),
    "a row is doubled": _rewrite(lambda table: pa.concat_tables([table.slice(0, 1), table])),
    "two answers are swapped": _rewrite(lambda table: _swap(table, "text")),
    "two inputs are swapped": _rewrite(lambda table: _swap(table, "prompt")),
    "two keys are the same": _rewrite(lambda table: pa.concat_tables([table.slice(0, 1), table.slice(0, 1), table])),
    "the output is cut": lambda watch: watch.output.write_bytes(watch.output.read_bytes()[:-9]),
    "a part is gone": lambda watch: _parts(watch)[0].unlink(),
    "a part has changed": lambda watch: _parts(watch)[0].write_bytes(_parts(watch)[-1].read_bytes() + b"x"),
    "a part stands twice in the manifest": _double_a_part,
    "a record is gone": lambda watch: (watch.run / "manifest.jsonl").write_bytes(b""),
    "failures are gone": lambda watch: (watch.run / "failures.parquet").unlink(),
}


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    """Good rows and bad ones, one start, no faults."""
    plain = (
        made
        for made in map(make_schedule, range(1000))
        if made.spec["output"]["path"] == "out.parquet" and b"[1, 2]" in made.lines
    )
    made = next(made for made in plain if not {"poison", "stuck"} & made.spec["engine"]["stub"].keys())
    return replace(made, starts=(Start(),))


@pytest.fixture(scope="module")
def finished(schedule: Schedule, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of its run."""
    folder = tmp_path_factory.mktemp("finished")
    result = run_schedule(schedule, folder, lambda _: None)
    assert (result.broken, result.codes) == (None, [3])
    return folder / "job"


@pytest.mark.parametrize("misdeed", MISDEEDS)
def test_the_checks_notice(schedule: Schedule, finished: Path, misdeed: str, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    shutil.copytree(finished, folder)
    watch = Watch(schedule, folder)
    watch.after(_FINISHED, schedule.lines)
    MISDEEDS[misdeed](watch)
    with pytest.raises(Broken):
        watch.after(_FINISHED, schedule.lines)
