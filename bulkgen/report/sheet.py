"""A table as data, and tables on a terminal: plain text in cells, nothing that a terminal obeys."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bulkgen.report.figures import visible


@dataclass(frozen=True, slots=True)
class Sheet:
    """Title, headers and rows of text; columns of the numbers in `right` are set to the right and never broken."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Collection[int] = ()


def print_sheets(sheets: Sequence[Sheet], console: Console) -> None:
    """One after the other, a line between them."""
    for i, sheet in enumerate(sheets):
        if i:
            console.print()
        console.print(_table(sheet, console))


def _table(sheet: Sheet, console: Console) -> Table:
    # Text objects are never read as markup.
    def text(value: str, style: str = "") -> Text:
        return Text(visible(value, console.encoding), style=style)

    table = Table(
        title=text(sheet.title, "bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False
    )
    table.show_header = any(sheet.headers)
    for i, header in enumerate(sheet.headers):
        table.add_column(header, justify="right" if i in sheet.right else "left", no_wrap=i in sheet.right)
    for row in sheet.rows:
        table.add_row(*map(text, row))
    return table
