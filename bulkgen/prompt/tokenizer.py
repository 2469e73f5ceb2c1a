"""Tokenizers behind one small face: chat template to text, texts to ids, ids to text."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bulkgen.errors import RowError, SpecError

Message = Mapping[str, Any]


class Tokenizer(Protocol):
    """`bos` is the id of the begin-of-text token, None where the model has none."""

    bos: int | None
    chat_template: str | None

    def chat_text(self, messages: Sequence[Message], template: str | None) -> str:
        """Messages as the text that the model was trained on.

        Raises RowError if the template fails on these messages, SpecError if it would on any.
        """

    def encode(self, texts: list[str], special: bool) -> list[Sequence[int]]:
        """Token ids; `special` adds what the tokenizer puts around a plain text (BOS, for one)."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, special tokens shown."""


class HubTokenizer:
    """A tokenizer in the format of Hugging Face, from a folder or the hub."""

    def __init__(self, name: str, revision: str | None) -> None:
        # The generic fast tokenizer reads any tokenizer.json and, unlike AutoTokenizer, does not import torch.
        from transformers import PreTrainedTokenizerFast

        self._name = name
        logging.getLogger("transformers").setLevel(logging.ERROR)
        try:
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(name, revision=revision)
            if self._tokenizer.backend_tokenizer is None:
                raise ValueError("no tokenizer.json")
        except Exception:
            self._tokenizer = _slow_tokenizer(name, revision)
        self.bos: int | None = self._tokenizer.bos_token_id
        self.chat_template: str | None = self._tokenizer.chat_template

    def chat_text(self, messages: Sequence[Message], template: str | None) -> str:
        from jinja2 import TemplateError, TemplateSyntaxError

        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, chat_template=template, add_generation_prompt=True, tokenize=False
            )
        except TemplateSyntaxError as e:
            whose = "input.chat_template" if template else f"model {self._name}: its chat template"
            raise SpecError(f"{whose}: line {e.lineno} is not valid Jinja2: {e.message}") from e
        except TemplateError as e:
            raise RowError("chat_template_error", f"the model's chat template refuses these messages: {e}") from e
        except Exception as e:  # a template computes with what the row holds: anything can go wrong in it
            reason = f"the model's chat template fails on these messages: {type(e).__name__}: {e}"
            raise RowError("chat_template_error", reason) from e
        return text

    def encode(self, texts: list[str], special: bool) -> list[Sequence[int]]:
        # Straight to the Rust side, which uses all cores; the wrapper's own objects cost a fifth on top.
        encodings = self._tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=special)
        return [encoding.ids for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text


def _slow_tokenizer(name: str, revision: str | None) -> Any:
    """For models without a tokenizer.json; imports torch where it is installed."""
    from transformers import AutoTokenizer

    try:
        # Said outright, since the library would otherwise ask on the terminal whether to run the model's own code.
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
        if tokenizer.backend_tokenizer is None:
            raise ValueError("has no fast tokenizer")
        return tokenizer
    except Exception as e:  # whatever the library meets in a damaged or foreign folder
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise SpecError(
            f"model {name!r}: its tokenizer cannot be loaded ({reason}); the model must bring a tokenizer.json"
        ) from e


class StubTokenizer:
    """A token is three bytes of UTF-8, so that ids are small, lengths plausible, and the way back is exact."""

    bos: int | None = None
    chat_template: str | None = "role: content, a line each"

    def chat_text(self, messages: Sequence[Message], template: str | None) -> str:
        return (
            "\n".join(f"{m['role']}: {m.get('content', '')}" for m in messages)
            if len(messages) > 1
            else (str(messages[0].get("content", "")))
        )

    def encode(self, texts: list[str], special: bool) -> list[Sequence[int]]:
        return [self._encode(text) for text in texts]

    @staticmethod
    def _encode(text: str) -> Any:
        raw = text.encode(errors="surrogatepass")
        triples = np.frombuffer(raw.ljust(-(-len(raw) // 3) * 3, b"\0"), np.uint8).reshape(-1, 3)
        return triples @ _PLACES

    def decode(self, tokens: Sequence[int]) -> str:
        ids: npt.NDArray[np.int32] = np.asarray(tokens, "<i4")
        return ids.view(np.uint8).reshape(-1, 4)[:, :3].tobytes().rstrip(b"\0").decode(errors="replace")


_PLACES = np.array([1, 1 << 8, 1 << 16], np.int32)
