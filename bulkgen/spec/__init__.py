"""The job spec: one YAML file, read once, checked whole, frozen, and printed as resolved into the run folder."""

from bulkgen.spec.jobspec import JobSpec, check_collisions, default_of, spec_json_schema
from bulkgen.spec.loading import load_spec
from bulkgen.spec.sampling import check_sampling_value

__all__ = ["JobSpec", "check_collisions", "check_sampling_value", "default_of", "load_spec", "spec_json_schema"]
