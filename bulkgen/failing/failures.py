"""All failures of a run as it is at a moment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bulkgen.committed import last_merge
from bulkgen.failing.failed_row import Ordinals, Source
from bulkgen.failing.own_input import OwnInput
from bulkgen.failing.sources import Merged, SoFar
from bulkgen.plan import find_plan
from bulkgen.report import load_status
from bulkgen.rundir import RunDir, read_manifest


@dataclass(frozen=True, slots=True)
class Failures:
    """The failed rows of a run, those with certain codes (`of`) by code, the most frequent first.

    `rows` and `failed` count all rows of the run. `final`: no more rows can fail in it as it is.
    """

    run: RunDir
    state: str
    final: bool
    rows: int
    failed: int
    of: Mapping[str, Ordinals]
    known_codes: Sequence[str]
    source: Source
    input: OwnInput

    @property
    def ordinals(self) -> Ordinals:
        """All of them, rising."""
        return np.sort(np.concatenate([*self.of.values(), np.empty(0, np.int64)]))

    def examples(self) -> dict[str, str]:
        """A sentence for each code: that of its first row."""
        firsts = np.sort(np.array([ordinals[0] for ordinals in self.of.values()], np.int64))
        return {row.code: row.error for row in self.source.details(firsts, places=False)}


def load_failures(run: RunDir, codes: Sequence[str] = ()) -> Failures:
    """The failures of a run as it is at this moment, all or those with certain codes. Raises OutputError."""
    records = read_manifest(run.manifest)
    alive = run.is_held()
    merged = last_merge(records)
    own_input = OwnInput(run, records)
    if merged is not None and run.failures.is_file():
        source: Source = Merged(run.failures, own_input)
        rows = merged["rows"]
    else:
        plan = find_plan(run.plan)
        source = SoFar(run, plan, records, own_input)
        rows = plan.rows if plan else 0
    index = source.index()
    order = np.argsort(-np.bincount(index.code, minlength=len(index.codes)), kind="stable").tolist()
    known = [index.codes[i] for i in order]
    of = {index.codes[i]: index.ordinals[index.code == i] for i in order if not codes or index.codes[i] in codes}
    state = load_status(run.path, alive).state
    return Failures(
        run, state, merged is not None and not alive, rows, len(index.ordinals), of, known, source, own_input
    )
