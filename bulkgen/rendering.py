"""`bulkgen render`: what would be sent for a few rows, without an engine and without a run folder."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from bulkgen.errors import InputError
from bulkgen.preparation import open_data, open_job_model, open_job_renderer
from bulkgen.prompt import Renderer
from bulkgen.records import BadRow, Prompt, RefusedRow
from bulkgen.report import visible
from bulkgen.spec import JobSpec


def render_rows(spec: JobSpec, number: int, row_id: str | None, say: Callable[[str], None]) -> Iterator[str]:
    """Lines that show the first `number` rows, or the one whose id column reads `row_id`.

    Raises InputError when there is no such row.
    """
    dataset = open_data(spec)
    renderer = open_job_renderer(spec, open_job_model(spec, say))
    batches = dataset.rows(renderer.columns)
    if row_id is None:
        # No more is rendered than is shown: a template may take its time.
        batches = (replace(b, positions=b.positions[:number], rows=b.rows[:number]) for b in batches)
    rows = (
        (batch.file, batch.positions[i], batch.rows[i], rendered)
        for batch in batches
        for i, rendered in enumerate(renderer.render(batch))
        if row_id is None or _has_id(spec, batch.rows[i], row_id)
    )
    shown = 0
    for file, position, _, rendered in islice(rows, 1 if row_id is not None else number):
        shown += 1
        yield from _lines(renderer, f"{file}:{position}", rendered)
    if not shown:
        wanted = f"no row with id {row_id!r}" if row_id is not None else "no rows"
        raise InputError(f"{', '.join(spec.input.paths)}: {wanted}; check input.path and input.id")


def _has_id(spec: JobSpec, row: dict[str, Any] | BadRow, wanted: str) -> bool:
    name = spec.input.id_column
    return name is not None and isinstance(row, dict) and str(row.get(name)) == wanted


def _lines(renderer: Renderer, where: str, rendered: Prompt | RefusedRow) -> Iterator[str]:
    if isinstance(rendered, RefusedRow):
        yield f"--- {where}  refused: {rendered.code}: {visible(rendered.message)}"
        return
    count = len(rendered.tokens)
    warned = f", warnings {' '.join(rendered.warnings)}" if rendered.warnings else ""
    own = f"own sampling {rendered.overrides}"
    yield f"--- {where}  {count} prompt tokens, max_tokens {rendered.max_tokens}, {own}{warned}"
    for line in renderer.text(rendered.tokens).split("\n"):
        yield visible(line, limit=100_000)
    yield f"tokens: {' '.join(map(str, rendered.tokens))}"
