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
    table = new_table(sheet.title, sheet.headers, sheet.right, console)
    for row in sheet.rows:
        table.add_row(*(shown(cell, console) for cell in row))
    return table


def new_table(title: str, headers: Sequence[str], right: Collection[int], console: Console) -> Table:
    """A table without rows, as bulkgen's all look; `right` as in Sheet."""
    table = Table(
        title=shown(title, console, "bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        show_header=any(headers),
    )
    for i, header in enumerate(headers):
        table.add_column(header, justify="right" if i in right else "left", no_wrap=i in right)
    return table


def shown(text: str, console: Console, style: str = "") -> Text:
    """Text for a cell: never read as markup, and with nothing in it that a terminal would obey."""
    return Text(visible(text, console.encoding), style=style)
