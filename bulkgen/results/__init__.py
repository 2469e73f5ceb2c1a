"""Results on disk: part files in finish order, refused rows, and the merge of both with the input in input order."""

from bulkgen.results.answers import judged
from bulkgen.results.disk import open_parquet, reading
from bulkgen.results.key_files import load_kept, load_keys, write_kept, write_keys
from bulkgen.results.merge import MergeResult, merge
from bulkgen.results.output import TEXT_COLUMN, output_files
from bulkgen.results.parts import (
    ANSWER_SCHEMA,
    PART_SCHEMA,
    About,
    PartRow,
    answered,
    done_row,
    failed_row,
    read_keys,
    read_part,
    repeated_row,
    write_part,
    write_tables,
)
from bulkgen.results.refused import RefusedWriter, read_refused
from bulkgen.results.retired import keys_of_done, keys_to_retry
from bulkgen.results.spool import CommittedPart

__all__ = [
    "ANSWER_SCHEMA",
    "PART_SCHEMA",
    "TEXT_COLUMN",
    "About",
    "CommittedPart",
    "MergeResult",
    "PartRow",
    "RefusedWriter",
    "answered",
    "done_row",
    "failed_row",
    "judged",
    "keys_of_done",
    "keys_to_retry",
    "load_kept",
    "load_keys",
    "merge",
    "open_parquet",
    "output_files",
    "read_keys",
    "read_part",
    "read_refused",
    "reading",
    "repeated_row",
    "write_kept",
    "write_keys",
    "write_part",
    "write_tables",
]
