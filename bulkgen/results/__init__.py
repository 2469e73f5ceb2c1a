"""Results on disk: part files in finish order, refused rows, and the merge of both with the input in input order."""

from bulkgen.results.merge import MergeResult, merge
from bulkgen.results.parts import PART_SCHEMA, PartRow, done_row, failed_row, read_keys, write_part
from bulkgen.results.refused import RefusedWriter, read_refused

__all__ = [
    "PART_SCHEMA",
    "MergeResult",
    "PartRow",
    "RefusedWriter",
    "done_row",
    "failed_row",
    "merge",
    "read_keys",
    "read_refused",
    "write_part",
]
