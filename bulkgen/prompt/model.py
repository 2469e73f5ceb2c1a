"""What is known of a model without its weights: where it is, what identifies it, how long its context is."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bulkgen.errors import SpecError
from bulkgen.prompt.tokenizer import HubTokenizer, StubTokenizer, Tokenizer

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    "added_tokens.json",
    # Where there is no tokenizer.json, these are the tokenizer.
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
# Which tokens end an answer, for vLLM.
_ENDINGS = "generation_config.json"
# Of weights only pieces are read, spread evenly over all files: reading them whole would take longer than many a job.
# Training changes nearly every part of them.
_PIECES, _PIECE_BYTES = 512, 1024
_STUB_CONTEXT = 1 << 20


@dataclass(frozen=True, slots=True)
class Model:
    """A model as an engine and a renderer need it.

    `path` is a folder or a hub id. `fingerprint` changes when the model does, not when it is moved.
    `context_length` is None where the config names none. `tokenizer` loads on call: about a second. `config` is what
    config.json holds, empty for the stub.
    """

    path: str
    fingerprint: str
    context_length: int | None
    tokenizer: Callable[[], Tokenizer]
    config: Mapping[str, Any] = field(default_factory=dict)


def open_model(name: str, revision: str | None, folder: Path | None) -> Model:
    """Open `stub`, the model in `folder`, or, without a folder, a hub id. Raises SpecError when there is none."""
    if name == "stub":
        return Model("stub", "stub-1", _STUB_CONTEXT, StubTokenizer)
    if folder is not None:
        path = str(folder.absolute())
        config = _config(name, folder / "config.json")
        return Model(
            path, _fingerprint(name, folder), _context_length(config), lambda: HubTokenizer(path, None), config
        )
    file = _from_hub(name, revision)
    # The hub's cache keeps files under the commit that they belong to, whatever branch was asked for.
    commit = file.parent.name
    config = _config(name, file)
    return Model(name, f"{name}@{commit}", _context_length(config), lambda: HubTokenizer(name, revision), config)


def _from_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json", revision=revision))
    except Exception as e:  # no network, no such id, no access, no valid id: one and the same for the user
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise SpecError(
            f"model {name!r}: not a folder here, and not to be had from the model hub ({reason}); check the name, "
            "log in or download it beforehand, or give a folder; `model: demo` needs no hub"
        ) from e


def _config(name: str, file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise SpecError(f"model {name!r}: {file} cannot be read ({e}); a model folder holds a config.json") from e
    return config if isinstance(config, dict) else {}


def _context_length(config: dict[str, Any]) -> int | None:
    nested = config.get("text_config")
    for section in (config, nested if isinstance(nested, dict) else {}):
        keys = ("original_max_position_embeddings", *_CONTEXT_KEYS) if _is_long_rope(section) else _CONTEXT_KEYS
        for key in keys:
            value = section.get(key)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _is_long_rope(config: dict[str, Any]) -> bool:
    """Whether positions are computed in one of two ways, by max_model_len, so that this one shapes the answers.

    As vLLM does by itself (`_get_and_verify_max_len` in vllm/config/model.py), such a model has the context that it
    was first made for, unless the user wants more.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    return isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type")) in ("longrope", "su")


def _fingerprint(name: str, folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    try:
        for file in ("config.json", _ENDINGS, *_TOKENIZER_FILES):
            if (folder / file).is_file():
                digest.update(file.encode() + b"\0" + hashlib.blake2b((folder / file).read_bytes()).digest())
        weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("*.gguf")])
        for path in weights:
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            for piece in _pieces(path, size, -(-_PIECES // len(weights))):
                digest.update(piece)
    except OSError as e:
        raise SpecError(f"model {name!r}: {e.filename or folder} cannot be read ({e.strerror or e})") from e
    return digest.hexdigest()


def _pieces(path: Path, size: int, count: int) -> Iterator[bytes]:
    """So many pieces of a file, the first and the last among them."""
    with path.open("rb") as file:
        for number in range(count):
            yield os.pread(file.fileno(), _PIECE_BYTES, max(0, size - _PIECE_BYTES) * number // max(1, count - 1))
