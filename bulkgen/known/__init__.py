"""Answers that are known before an engine is asked: from the job's cache, and from earlier outputs.

A row's request key says what shapes its answer. A row whose key has an answer is done with it; rows whose answers are
drawn anew each time have no key, and neither do any that failed.
"""

from bulkgen.known.answering import KnownAnswers

__all__ = ["KnownAnswers"]
