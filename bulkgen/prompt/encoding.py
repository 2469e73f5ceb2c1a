"""From texts to token ids: exactly one BOS, and special tokens that a row's own text spells."""

from collections.abc import Sequence
from dataclasses import dataclass

from bulkgen.codes import BOS_IN_TEXT, SPECIAL_TOKENS
from bulkgen.errors import RowError
from bulkgen.prompt.composing import Composed
from bulkgen.prompt.source import SpecialTokens
from bulkgen.prompt.special import SpecialTexts
from bulkgen.prompt.tokenizer import Encode, Tokenizer

# Characters: what is little to encode, and the longest that a token is on average in a text that is no trick.
_LONG, _LONG_TOKEN = 1 << 20, 16

# Token ids, and whether more than one BOS stood before them.
_Tokens = tuple[Sequence[int], bool]


@dataclass(slots=True)  # not frozen, as Composed
class Encoded:
    """A prompt's token ids, and codes of warnings. Where it is not `whole` these are more than the context holds."""

    tokens: Sequence[int]
    warnings: tuple[str, ...] = ()
    whole: bool = True


class Encoder:
    """Encodes the texts of one job. Chat templates write their own BOS, plain text gets the tokenizer's.

    `special_tokens` says what is done about special tokens that a row's own text spells: they are sent and the row
    is warned of, or the row fails, or they are sent as the ordinary text that they are.

    Tokens cost a hundred times the memory of their text. So a text of more than `longest` characters, which hardly
    fits into a context of `max_model_len`, is encoded no further than it takes to know that it does not.
    """

    def __init__(self, tokenizer: Tokenizer, special_tokens: SpecialTokens, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self.longest = max(_LONG, _LONG_TOKEN * max_model_len)
        self._bos = tokenizer.bos
        self._encode = tokenizer.encode
        self._choice = special_tokens
        self._special = SpecialTexts(tokenizer.special)
        self._respelled = tokenizer.respelled(self._special.spellings) if special_tokens == "text" else None

    def encode(self, texts: Sequence[Composed | RowError]) -> list[Encoded | RowError]:
        """Tokens of each text, or why it cannot be sent; errors stay where they are."""
        begun = {
            i: self._begun(t) for i, t in enumerate(texts) if isinstance(t, Composed) and len(t.text) > self.longest
        }
        whole = iter(self._encoded([t for i, t in enumerate(texts) if isinstance(t, Composed) and not begun.get(i)]))
        return [t if isinstance(t, RowError) else begun.get(i) or next(whole) for i, t in enumerate(texts)]

    def _begun(self, text: Composed) -> Encoded | None:
        """The beginning of a long text, if that alone is more than the context holds."""
        [tokens] = self._encode([text.text[: self.longest]], text.plain)
        return Encoded(tokens, whole=False) if len(tokens) > self._max_model_len else None

    def _encoded(self, texts: Sequence[Composed]) -> list[Encoded | RowError]:
        whole = self._tokens(self._encode, [(t.text, t.plain) for t in texts])
        encoded: list[Encoded | RowError] = [Encoded(tokens) for tokens, _ in whole]
        suspects = [i for i, text in enumerate(texts) if text.masked is not None]
        if suspects and self._respelled is not None:
            for i, result in zip(suspects, self._as_text([texts[i] for i in suspects], self._respelled), strict=True):
                encoded[i] = result
        elif suspects:
            frames = self._tokens(self._encode, [(texts[i].masked or "", texts[i].plain) for i in suspects])
            for i, frame in zip(suspects, frames, strict=True):
                encoded[i] = self._compared(texts[i].masked or "", whole[i], frame)
        return encoded

    def _compared(self, masked: str, whole: _Tokens, frame: _Tokens) -> Encoded | RowError:
        """What the special tokens of a row come to, next to those of its frame: the same with its own masked."""
        bos = (BOS_IN_TEXT,) if whole[1] and not frame[1] else ()
        added = self._special.added(masked, whole[0], frame[0])
        if not added:
            return Encoded(whole[0], bos)
        if self._choice == "fail":
            reason = f"the row's own text spells special tokens of the model: {' '.join(added)}"
            return RowError(SPECIAL_TOKENS, f"{reason}; see input.special_tokens")
        return Encoded(whole[0], (*bos, SPECIAL_TOKENS))

    def _as_text(self, texts: Sequence[Composed], encode: Encode) -> list[Encoded | RowError]:
        respelled = [self._special.respelled(text.text, text.masked or "") for text in texts]
        sendable = [(new, text.plain) for new, text in zip(respelled, texts, strict=True) if new is not None]
        tokens = iter(self._tokens(encode, sendable))
        reason = "the row's own text spells special tokens of the model, and cannot be encoded as mere text"
        return [RowError(SPECIAL_TOKENS, reason) if new is None else Encoded(next(tokens)[0]) for new in respelled]

    def _tokens(self, encode: Encode, texts: Sequence[tuple[str, bool]]) -> list[_Tokens]:
        """Tokens of texts, plain (True) or written by a chat template."""
        by_kind = {kind: encode([t for t, plain in texts if plain is kind], kind) for kind in {p for _, p in texts}}
        ids = {kind: iter(encoded) for kind, encoded in by_kind.items()}
        return [self._one_bos(next(ids[plain])) for _, plain in texts]

    def _one_bos(self, tokens: Sequence[int]) -> _Tokens:
        """The tokens, with one BOS where several stood at the start, and whether that was so."""
        if self._bos is None:
            return tokens, False
        extra = 0
        while len(tokens) > extra + 1 and tokens[extra] == tokens[extra + 1] == self._bos:
            extra += 1
        return (tokens[extra:], True) if extra else (tokens, False)
