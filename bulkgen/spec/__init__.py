"""The job spec: one YAML file, read once, checked whole, frozen, and printed as resolved into the run folder."""

from bulkgen.spec.jobspec import JobSpec, check_collisions, default_of, spec_json_schema
from bulkgen.spec.loading import load_spec
from bulkgen.spec.sampling import STRUCTURED, check_sampling_together, check_sampling_value
from bulkgen.spec.structured import fits

__all__ = [
    "STRUCTURED",
    "JobSpec",
    "check_collisions",
    "check_sampling_together",
    "check_sampling_value",
    "default_of",
    "fits",
    "load_spec",
    "spec_json_schema",
]
