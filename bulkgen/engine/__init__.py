"""Engines and the processes they run in: the contract, vLLM, the stub, and the launcher of replicas.

vllm, torch and ray are imported here and nowhere else, and only in the process that runs an engine.
"""

from bulkgen.engine.contract import Engine, EngineSettings, open_engine

__all__ = ["Engine", "EngineSettings", "open_engine"]
