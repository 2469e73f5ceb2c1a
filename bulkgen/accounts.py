"""The report of a run out of what is on disk: its manifest, its parts and its plan."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bulkgen.committed import committed_parts
from bulkgen.plan import load_plan
from bulkgen.report import Computed, Report, summarize
from bulkgen.rundir import RunDir
from bulkgen.sizing import JobTokens, Physics


def summarize_run(run: RunDir, records: list[dict[str, Any]]) -> Report:
    """The report over all starts, at the price that the spec had last. `records` are the manifest's.

    Rows that are no longer in the input are told apart by the plan on disk.
    """
    price = {"usd_per_hour": last_price(records)}
    records = [record | price if record["record"] == "start" else record for record in records]
    try:
        plan = load_plan(run.plan)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return summarize(run, records, least_s=_least_s, alive=run.is_held())
    retired = {part.path: part.retired for part in committed_parts(run, records)}

    def in_plan(part: Path, keys: npt.NDArray[np.bytes_]) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = plan.lookup(keys) >= 0
        gone = retired.get(part)
        return found if gone is None else found & ~np.isin(keys, gone)

    return summarize(run, records, in_plan=in_plan, least_s=_least_s, alive=run.is_held())


def _least_s(physics: Mapping[str, Any], computed: Computed, steps: int) -> float:
    """Seconds that a replica's device needs at least for what was computed."""
    job = JobTokens(
        requests=computed.answers,
        prefill_tokens=computed.prefill_tokens,
        decode_tokens=computed.decode_tokens,
        prefill_pairs=computed.prefill_pairs,
        decode_pairs=computed.decode_pairs,
    )
    return Physics.from_json(physics).limit_s(job, steps)


def last_price(records: list[dict[str, Any]]) -> float | None:
    """The price of a replica for an hour that the spec named last, None if it named none."""
    prices = [record["usd_per_hour"] for record in records if record["record"] in ("start", "price")]
    return prices[-1] if prices else None
