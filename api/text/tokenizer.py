"""A model's tokenizer, from its folder, with caches of what it has tokenized; and token ids to text, as they arrive.

Importing transformers' AutoTokenizer takes seconds and a quarter of a gigabyte; `tokenizers` alone takes 50
ms. Only a folder without `tokenizer.json` needs the former, once, at start.

A tokenizer first looks for added tokens in the text and then tokenizes what is between them. So a text's ids
are those of its segments in order, if each segment but the first begins with an added token. In a chat each
message is a segment, so only a turn's new messages are tokenized (`SegmentCache`).

New messages repeat words. Byte-level tokenizers of the usual kinds never look across a space that follows a
character other than white space. So a text's ids are those of its words, which are looked up (`WordCache`).

Back to text, a character whose bytes are split over tokens waits for all of them. Byte-level BPE writes each byte
as one printable character, by GPT-2's fixed table. So a token's bytes are a lookup, and the text comes from an
incremental UTF-8 decoder, which never splits a character.
"""

from __future__ import annotations

import asyncio
import codecs
import functools
import json
import operator
import re
import threading
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import tokenizers
from tokenizers.decoders import DecodeStream

from tandem.api.text.tenant_cache import NO_OWNER, CacheOwner, TenantCache
from tandem.base.errors import ConfigurationError

# Encoding more takes over a millisecond, so a thread does it.
INLINE_CHARACTERS = 2_000
INLINE_TOKENS = 2_000
# The memory for cached segments.
KEPT_BYTES = 64 << 20
# NFC makes one character of up to four; other normalizers seldom shrink a text as much.
_SHRINKS_AT_MOST = 4
# Tokenizing a shorter segment is faster than looking it up.
LEAST_CHARACTERS = 64
_CHARACTER_BYTES, _ID_BYTES, _ENTRY_BYTES = 2, 4, 400

# How much of a text a pattern searches in one call. The interpreter's lock is held for that long, also in a thread.
_WINDOW_CHARACTERS = 64 << 10


def matches(pattern: re.Pattern[str], text: str, longest: int) -> Iterator[re.Match[str]]:
    """Returns what `pattern.finditer(text)` does, and lets other threads run in between. The pattern is of fixed
    texts of at most `longest` characters."""
    if len(text) <= _WINDOW_CHARACTERS:
        return pattern.finditer(text)
    return _matches_in_windows(pattern, text, longest)


def _matches_in_windows(pattern: re.Pattern[str], text: str, longest: int) -> Iterator[re.Match[str]]:
    at = 0
    while at < len(text):
        end = at + _WINDOW_CHARACTERS
        at = end
        for found in pattern.finditer(text, end - _WINDOW_CHARACTERS, end + longest - 1):
            if found.start() >= end:
                break
            yield found
            at = max(end, found.end())


_Key = tuple[bool, str]  # whether it is the first of its text, and the segment


def boundaries_of(backend: tokenizers.Tokenizer) -> tuple[re.Pattern[str], frozenset[str], int] | None:
    """Returns a pattern that finds added tokens in a text, those before which the text may be cut, and the
    longest one's length; None when it may not be cut at all."""
    added = list(backend.get_added_tokens_decoder().values())
    # A token that must be a whole word depends on its neighbours, which a cut would hide.
    if any(token.single_word for token in added):
        return None
    in_text = sorted(
        {token.content for token in added if not token.normalized and token.content}, key=len, reverse=True
    )
    strips = {token.content for token in added if token.lstrip or token.rstrip}
    cuts = frozenset(in_text) - strips
    # The leftmost and then the longest, as the tokenizer matches.
    return (re.compile("|".join(map(re.escape, in_text))), cuts, len(in_text[0])) if cuts else None


# The patterns that cut a text into pieces before byte-level BPE, of GPT-2 (`ByteLevel` has its own), Llama 3,
# Qwen 2 and GPT-4o. No piece has a space after a character other than white space, and no pattern looks back.
_PATTERNS = frozenset(
    {
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
# Characters that no table counts as white space. A text may be cut before a space that follows one of them.
_ENDS_WORD = re.compile("[!-~\u00c0-\u02ff\u0370-\u058f\uac00-\ud7a3]")
# Longer words seldom occur again, so they are not kept.
WORD_CHARACTERS = 32
MOST_WORDS = 32_768
# A text with more new words is tokenized as a whole, which is faster, and so many of them are learned for the
# next text.
MOST_NEW_WORDS = 48


def keeps_words(backend: tokenizers.Tokenizer) -> bool:
    """Whether a text's ids are those of its words, if it is cut before spaces that follow no white space."""
    if any(
        token.single_word or token.lstrip or token.rstrip or re.search(r"\s", token.content)
        for token in backend.get_added_tokens_decoder().values()
    ):
        return False
    made = json.loads(backend.to_str())
    model, normalizer, cutting = made["model"], made["normalizer"], made["pre_tokenizer"]
    if model["type"] != "BPE" or model.get("dropout") or (normalizer and normalizer["type"] != "NFC"):
        return False
    steps = cutting["pretokenizers"] if cutting and cutting["type"] == "Sequence" else [cutting]
    return len(steps) in (1, 2) and all(steps) and _is_byte_level(steps[-1]) and _cuts(*steps)


def _is_byte_level(step: dict[str, Any]) -> bool:
    return step["type"] == "ByteLevel" and step["add_prefix_space"] is False


def _cuts(first: dict[str, Any], last: dict[str, Any] | None = None) -> bool:
    """Whether this pre-tokenizer cuts at every such place."""
    if last is None or first["type"] == "Digits":
        return bool((last or first)["use_regex"])
    return (
        first["type"] == "Split"
        and first["pattern"].get("Regex") in _PATTERNS
        and first["behavior"] == "Isolated"
        and not first["invert"]
        and not last["use_regex"]
    )


class _Words(NamedTuple):
    """The words of one tenant."""

    ids: dict[str, Sequence[int]]  # by word, without its space
    first_ids: dict[str, Sequence[int]]  # by the first word of a text

    @property
    def size(self) -> int:
        return len(self.ids) + len(self.first_ids)

    def look_up(self, words: list[str]) -> list[Sequence[int] | None]:
        found = [*map(self.ids.get, words)]
        found[0] = self.first_ids.get(words[0])
        return found


_NO_WORDS = _Words({}, {})


class WordCache:
    """The ids of words, each with the space before it, tenant by tenant: which words are known, and so fast, tells
    nothing of another tenant's texts. Thread-safe: two threads that learn the same word learn the same ids."""

    def __init__(self, encode: Callable[[list[str]], Sequence[Sequence[int]]]) -> None:
        self._encode = encode
        self._known: dict[str, _Words] = {}  # by tenant
        self._size = 0
        self._lock = threading.Lock()

    def encode(self, text: str, tenant: str = "") -> list[int]:
        known = self._known.get(tenant, _NO_WORDS)
        words = text.split(" ")
        found = known.look_up(words)
        return self._learn(known, tenant, text, words, found) if None in found else _together(found)

    def _learn(
        self, known: _Words, tenant: str, text: str, words: list[str], found: list[Sequence[int] | None]
    ) -> list[int]:
        """Tokenizes only the words that were not found, which in a long text are few."""
        missing = [place for place, one in enumerate(found) if one is None]
        if not all(_ends_word(words[place]) for place in missing if place + 1 < len(words)):
            words = _joined(words)
            found = known.look_up(words)
            missing = [place for place, one in enumerate(found) if one is None]
        new = list(dict.fromkeys([words[place] for place in missing if place]))
        few = len(new) <= MOST_NEW_WORDS
        first = words[0] if few else text
        of_first, *of_new = self._encode([first, *(f" {word}" for word in new[:MOST_NEW_WORDS])])
        here = dict(zip(new, of_new, strict=False))
        self._keep(tenant, here, {first: of_first} if few else {})
        if not few:
            return list(of_first)
        for place in missing:
            found[place] = here[words[place]] if place else of_first
        return _together(found)

    def _keep(self, tenant: str, words: dict[str, Sequence[int]], first: dict[str, Sequence[int]]) -> None:
        """Adds what was found. When there are too many entries, the tenant with most starts again from empty, and
        its words in use soon return."""
        with self._lock:
            known = self._known.setdefault(tenant, _Words({}, {}))
            before = known.size
            known.ids.update(_worth_keeping(words))
            known.first_ids.update(_worth_keeping(first))
            self._size += known.size - before
            while self._size > MOST_WORDS:
                largest = max(self._known, key=lambda name: self._known[name].size)
                self._size -= self._known.pop(largest).size


def _together(found: list[Sequence[int] | None]) -> list[int]:
    """Joins the ids. The caller has made sure that none is None."""
    ids: list[int] = []
    return functools.reduce(operator.iconcat, found, ids)


def _ends_word(word: str) -> bool:
    return _ENDS_WORD.match(word[-1:]) is not None


def _worth_keeping(found: dict[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    return {word: ids for word, ids in found.items() if len(word) <= WORD_CHARACTERS and _ends_word(word)}


def _joined(words: list[str]) -> list[str]:
    """Joins each word after which the text must not be cut with the next one."""
    joined: list[str] = []
    open_ended = False
    for word in words:
        if open_ended:
            joined[-1] += f" {word}"
        else:
            joined.append(word)
        open_ended = not _ends_word(word)
    return joined


class SegmentCache:
    """The ids of texts' segments, the most recently used ones of each tenant. Thread-safe."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer | None,
        encode: Callable[[list[str], str], Sequence[Sequence[int]]],
        most_bytes: int,
    ) -> None:
        """`backend`: the tokenizer behind `encode`. None: a text is cached as a whole, and never cut. `encode` gets
        segments and their tenant."""
        self._boundaries = boundaries_of(backend) if backend is not None else None
        self._encode = encode
        self._most_bytes = most_bytes
        self._known: TenantCache[_Key, array[int]] = TenantCache(most_bytes)

    def segments(self, text: str) -> list[str]:
        if self._boundaries is None:
            return [text]
        pattern, cuts, longest = self._boundaries
        starts = [
            found.start()
            for found in matches(pattern, text, longest)
            if found.start() and found.group() in cuts
        ]
        return [text[start:end] for start, end in zip([0, *starts], [*starts, len(text)], strict=True)]

    @property
    def size(self) -> int:
        """The bytes of all entries."""
        return self._known.size

    def encode(self, text: str, owner: CacheOwner = NO_OWNER) -> list[int]:
        # The first segment begins the text, where some tokenizers add a space.
        keys = [(i == 0, segment) for i, segment in enumerate(self.segments(text))]
        parts: list[Sequence[int] | None] = [*self._known.get_all(owner, keys)]
        if None in parts:
            missing = [i for i, part in enumerate(parts) if part is None]
            made = self._encode([keys[i][1] for i in missing], owner.tenant)
            for i, ids in zip(missing, made, strict=True):
                parts[i] = ids
                if len(keys[i][1]) >= LEAST_CHARACTERS:
                    self._keep(owner, keys[i], array("I", ids))
        together: list[int] = []
        for part in parts:
            together += part or ()
        return together

    def _keep(self, owner: CacheOwner, key: _Key, ids: array[int]) -> None:
        size = _size(key, ids)
        if size <= self._most_bytes // 4:
            self._known.put(owner, key, ids, size)


def _size(key: _Key, ids: array[int]) -> int:
    return _CHARACTER_BYTES * len(key[1]) + _ID_BYTES * len(ids) + _ENTRY_BYTES


_utf8_decoder = codecs.getincrementaldecoder("utf-8")
_decode_utf8 = codecs.utf_8_decode
_LETTER = "a"


class Detokenizer(Protocol):
    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these tokens complete; "" while a character is incomplete."""
        ...

    def finish(self) -> str:
        """Returns what is left at the end: bytes that never became a character, as U+FFFD."""
        ...


class ByteDetokenizer:
    """For byte-level tokenizers: each token stands for its bytes, and UTF-8 says where characters end."""

    def __init__(self, token_bytes: list[bytes], skipped: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._rest = b""  # of an incomplete character

    def push(self, token_ids: Sequence[int]) -> str:
        table, skipped = self._token_bytes, self._skipped
        data = self._rest + b"".join(
            [
                table[token_id]
                for token_id in token_ids
                if token_id not in skipped and 0 <= token_id < len(table)
            ]
        )
        text, taken = _decode_utf8(data, "replace", False)
        self._rest = data[taken:]
        return text

    def finish(self) -> str:
        rest, self._rest = self._rest, b""
        return rest.decode("utf-8", "replace")


class StreamDetokenizer:
    """For all other tokenizers: uses the tokenizer's own decoder, which holds a token back until the text
    around it is settled.

    Tokens for single bytes never reach that decoder: it turns a run of them that is not UTF-8 into as many
    U+FFFD, also bytes that it has already given as text, and then fails. In their place it gets a token that
    is a letter, so that what follows does not begin a text.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, skipped: frozenset[int], byte_tokens: Mapping[int, bytes]
    ) -> None:
        self._backend = backend
        self._skipped = skipped
        self._byte_tokens = byte_tokens
        self._letter = next((token for token, byte in byte_tokens.items() if byte == _LETTER.encode()), None)
        self._decoder = _utf8_decoder(errors="replace")
        self._stream = DecodeStream(skip_special_tokens=False)
        self._held: list[int] = []  # tokens since the stream last gave text

    def push(self, token_ids: Sequence[int]) -> str:
        pieces: list[str] = []
        for token_id in token_ids:
            if token_id in self._skipped:
                continue
            byte = self._byte_tokens.get(token_id)
            if byte is not None and self._letter is not None:
                pieces.append(self._step(self._letter).removesuffix(_LETTER))
                pieces.append(self._decoder.decode(byte))
            else:
                pieces.append(self._decoder.decode(b"", final=True))
                pieces.append(self._step(token_id))
        return "".join(pieces)

    def _step(self, token_id: int) -> str:
        piece: str | None = self._stream.step(self._backend, token_id)
        if piece is None:
            self._held.append(token_id)
            return ""
        self._held.clear()
        return piece

    def finish(self) -> str:
        held, self._held = self._held, []
        text: str = self._backend.decode(held, skip_special_tokens=False) if held else ""
        return self._decoder.decode(b"", final=True) + text


def _byte_of_character() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + offset): byte for offset, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_of_character()


def bytes_of_piece(piece: str) -> bytes:
    """Returns a piece's bytes. A piece with a character outside the table (an added token with a space) is
    its own text."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in piece])
    except KeyError:
        return piece.encode()


_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")


def byte_of_fallback(piece: str) -> bytes | None:
    """Returns the byte of a token for one byte (SentencePiece's byte fallback), or None."""
    found = _FALLBACK.fullmatch(piece)
    return bytes.fromhex(found[1]) if found is not None else None


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
        self._words = (
            WordCache(lambda words: self._encode_all(words, special=False)) if keeps_words(backend) else None
        )
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
        """Returns the tokens that end an answer by the tokenizer's settings."""
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
        return self.special_ids - {
            token_id for text in shown if (token_id := self.token_id(text)) is not None
        }

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

        backend: tokenizers.Tokenizer = AutoTokenizer.from_pretrained(str(path)).backend_tokenizer
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise ConfigurationError(f"{path} has no tokenizer.json, and none could be made: {error}") from error
    return backend
