"""Print some columns of the first rows of a Parquet file: `show.py FILE COLUMN...`."""

import sys

import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table


def main() -> None:
    """Show eight rows."""
    path, *columns = sys.argv[1:]
    with pq.ParquetFile(path) as file:
        rows = next(file.iter_batches(8, columns=columns)).to_pylist()
        total = file.metadata.num_rows
    table = Table(*columns, title=f"{path}: the first {len(rows)} of {total} rows", show_lines=True)
    for row in rows:
        table.add_row(*(str(row[column]).strip() for column in columns))
    Console().print(table)


if __name__ == "__main__":
    main()
