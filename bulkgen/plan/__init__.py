"""The plan: what is to be sent, on disk, cut into shards by prompt length. Neither rows nor prompts stay in memory.

A plan folder is built under a temporary name and renamed when whole. In it:

    plan.json           totals, bucket edges, shards, what the plan was made from
    keys.bin            16 bytes a row, in input order
    contents.bin        hashes of what each row brings along itself, to know it again under other settings
    sorted.bin          the rows' ordinals in the order of their keys, to find a row by its key
    state.bin           one byte a row: pending, refused or committed
    requests.bin        each row's request key: a hash of all that shapes its answer; zeros where that is drawn anew
    repeats.bin         rows whose request others have too, by group
    offers.bin          two bytes a row: how often it was in an engine, and whether it is
    bucket-NN.arrow     token ids and sampling of the rows of one length range: in input order, or with those together
                        that begin alike, where a prefix cache needs it
    bucket-NN.rows      ordinal, prompt tokens, max_tokens and common prefix of the same rows, for arithmetic
"""

from bulkgen.plan.buckets import bucket_edges, cut_shards
from bulkgen.plan.lengths import Lengths
from bulkgen.plan.planned import Plan, PlannedRow, find_plan, load_plan
from bulkgen.plan.requests import RequestHasher
from bulkgen.plan.shape import PhaseCosts, Phases
from bulkgen.plan.workload import BLOCK_SIZES, Workload, measure
from bulkgen.plan.writer import PlanWriter

__all__ = [
    "BLOCK_SIZES",
    "Lengths",
    "PhaseCosts",
    "Phases",
    "Plan",
    "PlanWriter",
    "PlannedRow",
    "RequestHasher",
    "Workload",
    "bucket_edges",
    "cut_shards",
    "find_plan",
    "load_plan",
    "measure",
]
