"""From a row to what is sent: the model's tokenizer and chat template, the job's templates, tokens, row keys.

transformers and jinja2 are imported here and nowhere else; neither torch nor vLLM is. Templates run in a process of
their own (sandbox.py).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bulkgen.prompt.batch_renderer import BatchRenderer
    from bulkgen.prompt.identity import ContentHash
    from bulkgen.prompt.model import Model, open_model
    from bulkgen.prompt.renderer import Renderer
    from bulkgen.prompt.source import PromptSource
    from bulkgen.prompt.templates import way_round

__all__ = ["BatchRenderer", "ContentHash", "Model", "PromptSource", "Renderer", "open_model", "way_round"]

_HOMES = {
    "BatchRenderer": "batch_renderer",
    "ContentHash": "identity",
    "Model": "model",
    "PromptSource": "source",
    "Renderer": "renderer",
    "open_model": "model",
    "way_round": "templates",
}


def __getattr__(name: str) -> Any:
    """What is asked for, loaded when it is: the templates' process needs little of this package."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
