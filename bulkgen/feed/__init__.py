"""How much work an engine gets at a time: pure policy, no engine, no clock, no files."""

from bulkgen.feed.admission import Admission, Candidate
from bulkgen.feed.expected_output import PRIOR_SHARE
from bulkgen.feed.order import row_order, shard_order
from bulkgen.feed.suspects import Inquest, Suspect

__all__ = ["PRIOR_SHARE", "Admission", "Candidate", "Inquest", "Suspect", "row_order", "shard_order"]
