"""The job's input: which files it is made of, their rows one after the other, their columns for the output.

Here belongs everything that knows how Parquet and JSON Lines are read. What a row means (prompts, ids,
sampling) is `prompt`'s business; what becomes of it, that of `plan` and `results`.
"""

from bulkgen.dataset.dataset import DataSet, TableBatch, open_dataset
from bulkgen.dataset.files import InputFile
from bulkgen.dataset.json_columns import JSON_TEXT

__all__ = ["JSON_TEXT", "DataSet", "InputFile", "TableBatch", "open_dataset"]
