"""From a row to what is sent: the model's tokenizer and chat template, the job's templates, tokens, row keys.

transformers and jinja2 are imported here and nowhere else; neither torch nor vLLM is.
"""

from bulkgen.prompt.model import Model, open_model
from bulkgen.prompt.renderer import PromptSource, Renderer

__all__ = ["Model", "PromptSource", "Renderer", "open_model"]
