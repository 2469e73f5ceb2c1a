"""bulkgen: an offline bulk-generation job runner for vLLM."""

__version__ = "0.1.0"
