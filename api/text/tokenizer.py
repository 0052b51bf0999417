"""A model's tokenizer, from its folder, with caches of what it has tokenized.

Importing transformers' AutoTokenizer takes seconds and a quarter of a gigabyte; `tokenizers` alone takes 50
ms. Only a folder without `tokenizer.json` needs the former, once, at start.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import tokenizers

from tandem.api.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    StreamDetokenizer,
    byte_of_fallback,
    bytes_of_piece,
)
from tandem.api.text.segment_cache import SegmentCache
from tandem.api.text.tenant_cache import NO_OWNER, CacheOwner
from tandem.api.text.word_cache import WordCache, keeps_words
from tandem.base.errors import ConfigurationError

# Encoding more takes over a millisecond, so a thread does it.
INLINE_CHARACTERS = 2_000
INLINE_TOKENS = 2_000
# The memory for cached segments.
KEPT_BYTES = 64 << 20
# NFC makes one character of up to four; other normalizers seldom shrink a text as much.
_SHRINKS_AT_MOST = 4


class Tokenizer:
    """Encodes prompts and decodes answers. Requests may share it, also from threads."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: dict[str, Any]) -> None:
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        self.settings = settings
        added = backend.get_added_tokens_decoder()
        special = {token_id: token for token_id, token in added.items() if token.special}
        self.special_ids = frozenset(special)
        self.special_texts = [token.content for token in special.values()]
        self._finds_normalized = any(token.normalized for token in special.values())
        self.end_ids = self._end_ids()
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._longest_piece = max(map(len, vocabulary), default=1)
        self._words = WordCache(lambda words: self._encode_all(words, special=False)) if keeps_words(backend) else None
        self._segments = SegmentCache(backend, self._encode_parts, KEPT_BYTES)
        # A tokenizer that adds tokens adds them at a text's ends, so with them a text is not cut.
        self._wholes = self._segments
        if backend.num_special_tokens_to_add(is_pair=False):
            self._wholes = SegmentCache(
                None, lambda texts, tenant: self._encode_all(texts, special=True), KEPT_BYTES // 4
            )
        self._bytes: list[bytes] | None = None
        self._byte_tokens: dict[int, bytes] = {}  # of a tokenizer that is not byte-level
        kinds = _decoder_kinds(backend)
        if "ByteFallback" in kinds:
            self._byte_tokens = {
                token_id: byte
                for piece, token_id in vocabulary.items()
                if (byte := byte_of_fallback(piece)) is not None
            }
        if kinds == ["ByteLevel"]:
            self._bytes = [b""] * self.vocab_size
            for piece, token_id in vocabulary.items():
                self._bytes[token_id] = bytes_of_piece(piece)

    @classmethod
    def from_folder(cls, folder: str) -> Tokenizer:
        path = Path(folder)
        if not path.is_dir():
            raise ConfigurationError(f"router.tokenizer_path: {folder!r} is not a folder")
        settings = read_json(path / "tokenizer_config.json")
        file = path / "tokenizer.json"
        if not file.exists():
            return cls(_convert(path), settings)
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises a bare Exception for a file that it cannot read
            raise ConfigurationError(f"{file} is not a tokenizer: {error}") from error
        return cls(backend, settings)

    def _end_ids(self) -> frozenset[int]:
        declared = self.settings.get("eos_token")
        text = declared.get("content") if isinstance(declared, dict) else declared
        token_id = self._backend.token_to_id(text) if isinstance(text, str) else None
        return frozenset() if token_id is None else frozenset({token_id})

    @property
    def normalize_for_special(self) -> Callable[[str], str] | None:
        """How a text is normalized before special tokens are searched in it; None when it is not."""
        normalizer = self._backend.normalizer
        return normalizer.normalize_str if self._finds_normalized and normalizer is not None else None

    @functools.lru_cache(maxsize=16)  # noqa: B019 (a router has one tokenizer, to its end)
    def _skipped_beside(self, shown: tuple[str, ...]) -> frozenset[int]:
        return self.special_ids - {token_id for text in shown if (token_id := self.token_id(text)) is not None}

    def is_special(self, text: str) -> bool:
        return self._backend.token_to_id(text) in self.special_ids

    def token_id(self, text: str) -> int | None:
        """Returns the id of the token with exactly this text, or None."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def text_of(self, token_id: int) -> str | None:
        """Returns a token's name in the vocabulary, or None."""
        found: str | None = self._backend.id_to_token(token_id)
        return found

    def most_characters(self, num_tokens: int) -> int:
        """Returns the most characters that so many tokens can stand for. A text that is longer has more
        tokens, unless most of it is dropped, such as white space."""
        is_exact = self._bytes is not None and self._backend.normalizer is None
        return num_tokens * self._longest_piece * (1 if is_exact else _SHRINKS_AT_MOST)

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Encodes a text. `special`: let the tokenizer add its own tokens, such as a beginning-of-sequence
        token."""
        return self._encode_all([text], special)[0]

    async def encode_async(self, text: str, *, special: bool, owner: CacheOwner = NO_OWNER) -> list[int]:
        """Encodes a text by the owner's caches, a long one in a thread, so that other streams go on."""
        known = self._wholes if special else self._segments
        if len(text) > INLINE_CHARACTERS:
            return await asyncio.to_thread(known.encode, text, owner)
        return known.encode(text, owner)

    async def encode_all_async(self, texts: list[str], *, special: bool) -> list[list[int]]:
        if sum(map(len, texts)) <= INLINE_CHARACTERS:
            return self._encode_all(texts, special)
        return await asyncio.to_thread(self._encode_all, texts, special)

    def _encode_parts(self, parts: list[str], tenant: str) -> list[list[int]]:
        words = self._words
        if words is None or max(map(len, parts)) > INLINE_CHARACTERS:
            return self._encode_all(parts, special=False)
        return [words.encode(part, tenant) for part in parts]

    def _encode_all(self, texts: list[str], special: bool) -> list[list[int]]:
        # Always as a batch: the library's call for a single text holds the interpreter lock until it is done.
        return [found.ids for found in self._backend.encode_batch_fast(texts, add_special_tokens=special)]

    def decode(self, token_ids: list[int], *, skip_special: bool = False) -> str:
        text: str = self._backend.decode_batch([token_ids], skip_special_tokens=skip_special)[0]
        return text

    async def decode_async(self, token_ids: list[int]) -> str:
        if len(token_ids) <= INLINE_TOKENS:
            return self.decode(token_ids)
        return await asyncio.to_thread(self.decode, token_ids)

    def first_unknown(self, token_ids: list[int]) -> int | None:
        """Returns an id outside the vocabulary, or None. The caller has made sure that no id is negative."""
        largest = max(token_ids, default=0)
        return largest if largest >= self.vocab_size else None

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token contributes to the text, for log-probabilities, which show single
        tokens."""
        if self._bytes is not None:
            return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        byte = byte_of_fallback(piece)
        return byte if byte is not None else str(piece).replace("\u2581", " ").encode()

    def detokenizer(self, *, skip_special: bool = True, shown: Collection[str] = ()) -> Detokenizer:
        """Makes a detokenizer. `shown`: special tokens that are not skipped."""
        skipped = self._skipped_beside(tuple(shown)) if skip_special else frozenset[int]()
        if self._bytes is not None:
            return ByteDetokenizer(self._bytes, skipped)
        return StreamDetokenizer(self._backend, skipped, self._byte_tokens)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; {} when there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path} must hold a JSON object")
    return value


def _decoder_kinds(backend: tokenizers.Tokenizer) -> list[str]:
    description = json.loads(backend.to_str())["decoder"] if backend.decoder is not None else None
    if description is None:
        return []
    return [part["type"] for part in description.get("decoders", [description])]


def _convert(path: Path) -> tokenizers.Tokenizer:
    try:
        from transformers import AutoTokenizer

        backend: tokenizers.Tokenizer = AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=False
        ).backend_tokenizer
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise ConfigurationError(f"{path} has no tokenizer.json, and none could be made: {error}") from error
    return backend
