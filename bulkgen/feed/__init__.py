"""How much work an engine gets at a time: pure policy, no engine, no clock, no files."""

from bulkgen.feed.suspects import Inquest, Suspect
from bulkgen.feed.topup import TopUp

__all__ = ["Inquest", "Suspect", "TopUp"]
