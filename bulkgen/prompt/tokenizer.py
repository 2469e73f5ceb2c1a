"""Tokenizers behind one small face: texts to ids, ids to text, and what chat templates want to know of them."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bulkgen.errors import SpecError
from bulkgen.prompt.chat import STUB_CHAT

Encode = Callable[[list[str], bool], list[Sequence[int]]]


class Tokenizer(Protocol):
    """`bos` is the id of the begin-of-text token, None where the model has none.

    `chat_template` is None where there is none. `names` are the texts of special tokens that chat templates know by
    a name, `special` the ids of all special tokens by their texts.
    """

    bos: int | None
    chat_template: str | None
    names: Mapping[str, str]
    special: Mapping[str, int]

    def encode(self, texts: list[str], special: bool) -> list[Sequence[int]]:
        """Token ids; `special` adds what the tokenizer puts around a plain text (BOS, for one)."""

    def spans(self, texts: list[str]) -> list[list[tuple[int, int]]]:
        """Where each token of each text begins and ends, in characters."""

    def respelled(self, spellings: Mapping[str, str]) -> Encode:
        """`encode` of the same tokenizer where a special token is written as its spelling, and its text is text.

        Raises SpecError where that cannot be had.
        """

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
        self._backend = self._tokenizer.backend_tokenizer
        # A tokenizer.json may hold how a training cut and padded its texts; a prompt is what it is.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.bos: int | None = self._tokenizer.bos_token_id
        self.chat_template = _default_template(self._tokenizer.chat_template)
        self.names: Mapping[str, str] = self._tokenizer.special_tokens_map
        added = self._backend.get_added_tokens_decoder()
        self.special: Mapping[str, int] = {token.content: i for i, token in added.items() if token.special}

    def encode(self, texts: list[str], special: bool) -> list[Sequence[int]]:
        return _encode(self._backend, texts, special)

    def spans(self, texts: list[str]) -> list[list[tuple[int, int]]]:
        encodings = self._backend.encode_batch(texts, add_special_tokens=False)
        return [list(encoding.offsets) for encoding in encodings]

    def respelled(self, spellings: Mapping[str, str]) -> Encode:
        from tokenizers import Tokenizer as Backend

        try:
            backend = Backend.from_str(json.dumps(_respelled(json.loads(self._backend.to_str()), spellings)))
            if any(backend.token_to_id(spellings[text]) != i for text, i in self.special.items()):
                raise ValueError("ids are not kept")
        except Exception as e:  # whatever the library says to a form of tokenizer that is new
            raise SpecError(
                f"model {self._name}: input.special_tokens: text cannot be had with its tokenizer ({e}); choose warn "
                "or fail"
            ) from e
        return lambda texts, special: _encode(backend, texts, special)

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text


def _encode(backend: Any, texts: list[str], special: bool) -> list[Sequence[int]]:
    # Straight to the Rust side, which uses all cores; the wrapper's own objects cost a fifth on top.
    return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=special)]


def _default_template(template: str | dict[str, str] | None) -> str | None:
    """Of several templates by name, the one for chat without tools."""
    return template.get("default") if isinstance(template, dict) else template


def _respelled(tokenizer: dict[str, Any], spellings: Mapping[str, str]) -> dict[str, Any]:
    """A tokenizer.json with other texts for its special tokens, as added tokens and in the model's vocabulary."""
    for token in tokenizer["added_tokens"]:
        if token["special"]:
            token["content"] = spellings[token["content"]]
    model = tokenizer["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {spellings.get(text, text): i for text, i in model["vocab"].items()}
    else:  # Unigram: pairs of text and score, the id is the place
        model["vocab"] = [[spellings.get(text, text), score] for text, score in model["vocab"]]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = spellings.get(model["unk_token"], model["unk_token"])
    return tokenizer


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
    chat_template: str | None = STUB_CHAT
    names: Mapping[str, str] = {}
    special: Mapping[str, int] = {}

    def encode(self, texts: list[str], special: bool) -> list[Sequence[int]]:
        raw = [text.encode(errors="surrogatepass") for text in texts]
        whole = b"".join([piece for text in raw for piece in (text, _FILL[len(text) % 3])])
        low, middle, high = np.frombuffer(whole, np.uint8).reshape(-1, 3).T.astype(np.int32)
        ids: Any = low | middle << 8 | high << 16
        ends = [0, *accumulate(-(-len(text) // 3) for text in raw)]
        return [ids[start:end] for start, end in pairwise(ends)]

    def spans(self, texts: list[str]) -> list[list[tuple[int, int]]]:
        return [self._spans(text) for text in texts]

    @staticmethod
    def _spans(text: str) -> list[tuple[int, int]]:
        # The character that each byte belongs to.
        owners = [i for i, character in enumerate(text) for _ in character.encode(errors="surrogatepass")]
        return [(owners[i], owners[min(i + 2, len(owners) - 1)] + 1) for i in range(0, len(owners), 3)]

    def respelled(self, spellings: Mapping[str, str]) -> Encode:
        return self.encode

    def decode(self, tokens: Sequence[int]) -> str:
        ids: npt.NDArray[np.int32] = np.asarray(tokens, "<i4")
        return ids.view(np.uint8).reshape(-1, 4)[:, :3].tobytes().rstrip(b"\0").decode(errors="replace")


# What makes the bytes of a text threes, by what is left over.
_FILL = (b"", b"\0\0", b"\0")
