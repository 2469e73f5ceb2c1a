"""`bulkgen failures`: which rows failed and why, whatever state a run is in, and those rows as they came in.

After a merge all stands in failures.parquet. Before it, what planning refused stands in the plan, and what failed in
the engine in the parts: these know rows by their key, so that where such a row stands, and what it holds, is read from
the input, if that is still the same. Of all failures only some bytes a row are in memory.
"""

from bulkgen.failing.export import export_failures
from bulkgen.failing.failures import load_failures
from bulkgen.failing.shown import failure_json, failure_lines

__all__ = ["export_failures", "failure_json", "failure_lines", "load_failures"]
