"""Engine settings by measuring: a few candidates on a sample of a job's own data set, the best kept for later runs."""

from bulkgen.tune.page import tuning_json, tuning_tables
from bulkgen.tune.tune import Tuning, tune_job

__all__ = ["Tuning", "tune_job", "tuning_json", "tuning_tables"]
