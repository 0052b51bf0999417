"""Makes prompts of an exact number of tokens.

Text is the hard case: random tokens that are decoded to text seldom encode to the same number of tokens. So prompts are made of
words that are one token each after any other word. Such a text can be cut between any two words, or continued with more words,
and the counts still add up; so prompts can share a prefix to the token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import tokenizers

from tandem.base.errors import ConfigurationError
from tandem.loadgen.api import Prompt

# Every text begins with this word, so that each drawn word follows another word.
ANCHOR = "The"
# How byte-level and sentencepiece vocabularies spell a word after a space
_WORD = re.compile(r"[Ġ▁]([a-z]{2,})")
_ENOUGH_WORDS = 256
_MOST_WORDS = 16384


class Vocabulary(Protocol):
    @property
    def overhead(self) -> int:
        """The tokens of a prompt that are not words."""

    def draw(self, rng: np.random.Generator, words: int) -> list[int]: ...

    def prompt(self, words: Sequence[int]) -> Prompt:
        """Returns a prompt of `len(words) + overhead` tokens; of about as many, if the vocabulary is guessed."""

    def continuation(self, words: Sequence[int]) -> str: ...


def words_for(vocabulary: Vocabulary, tokens: int) -> int:
    """Returns how many words make a prompt of `tokens` tokens."""
    if tokens <= vocabulary.overhead:
        raise ConfigurationError(f"a prompt must have at least {vocabulary.overhead + 1} tokens, not {tokens}")
    return tokens - vocabulary.overhead


class TextVocabulary:
    """One model's words. Prompts are text."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._words, _ = _stable_words(backend)
        self.overhead = len(backend.encode(ANCHOR).ids)  # includes the tokens that the server adds by itself

    @property
    def words(self) -> list[str]:
        """The words, without the space before them. Each is one token after another word."""
        return [word.strip() for word in self._words]

    def draw(self, rng: np.random.Generator, words: int) -> list[int]:
        return [int(word) for word in rng.integers(0, len(self._words), size=words)]

    def prompt(self, words: Sequence[int]) -> str:
        text = ANCHOR + self.continuation(words)
        counted = len(self._backend.encode(text).ids)
        if counted != len(words) + self.overhead:
            raise ConfigurationError(
                f"this tokenizer makes {counted} tokens of {len(words) + self.overhead} words: "
                "send token ids instead, --prompt-format ids"
            )
        return text

    def continuation(self, words: Sequence[int]) -> str:
        return "".join(self._words[word] for word in words)


class IdVocabulary:
    """One model's words. Prompts are token ids, so the server's tokenizer is not involved."""

    overhead = 0

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        _, self._ids = _stable_words(backend)

    def draw(self, rng: np.random.Generator, words: int) -> list[int]:
        return [int(word) for word in rng.integers(0, len(self._ids), size=words)]

    def prompt(self, words: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._ids[word] for word in words)

    def continuation(self, words: Sequence[int]) -> str:
        raise ConfigurationError("a conversation continues the answer's text, so it needs --prompt-format text")


class GuessedVocabulary:
    """For use without a tokenizer: words so common that nearly every model has one token for each."""

    overhead = 1
    _WORDS = (  # noqa: SIM905 (as a list it would be a page)
        "about after all also and any are back been before both but came can come could day did down each even find "
        "first for from get give good great had has have her here him his home how into just know last life like "
        "little long look made make man many may men more most much must never new not now off old one only other our "
        "out over own part people place right said same see she should since some such take than that the their them "
        "then there these they think this those three time two under use very was water way well went were what when "
        "where which while who will with without word work world would year you your"
    ).split()

    def draw(self, rng: np.random.Generator, words: int) -> list[int]:
        return [int(word) for word in rng.integers(0, len(self._WORDS), size=words)]

    def prompt(self, words: Sequence[int]) -> str:
        return ANCHOR + self.continuation(words)

    def continuation(self, words: Sequence[int]) -> str:
        return "".join(f" {self._WORDS[word]}" for word in words)


def load_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json" if folder.is_dir() else folder
    if not file.is_file():
        raise ConfigurationError(f"--tokenizer {folder} must be a model's folder with a tokenizer.json in it")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust side raises nothing narrower
        raise ConfigurationError(f"{file} is not a tokenizer: {error}") from error


def _stable_words(backend: tokenizers.Tokenizer) -> tuple[list[str], list[int]]:
    """Returns the words that are one token each after another word, and those tokens."""
    spelled = [
        (token, f" {match[1]}")
        for name, token in sorted(backend.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
        if (match := _WORD.fullmatch(name))
    ][:_MOST_WORDS]
    before = backend.encode(ANCHOR, add_special_tokens=False).ids
    encodings = backend.encode_batch([ANCHOR + text for _, text in spelled], add_special_tokens=False)
    stable = [
        (token, text)
        for (token, text), encoding in zip(spelled, encodings, strict=True)
        if encoding.ids == [*before, token]
    ]
    if len(stable) < _ENOUGH_WORDS:
        raise ConfigurationError(
            f"this tokenizer has only {len(stable)} words of one token, and prompts need {_ENOUGH_WORDS}: send token ids instead, "
            "--prompt-format ids"
        )
    return [text for _, text in stable], [token for token, _ in stable]
