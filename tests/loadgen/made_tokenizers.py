"""Small tokenizers of the two families, made in milliseconds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

WORDS = ["".join(letters) for letters in itertools.product("bcdfghkm", "aeiou", "lnprstvz")]


def shared_beginning(one: Sequence[object], other: Sequence[object]) -> int:
    """The length of the longest common prefix of two prompts, in tokens."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def byte_level() -> tokenizers.Tokenizer:
    """Like GPT-2's and SmolLM2's: a space belongs to the word after it."""
    return _whole_words("Ġ", pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel())


def sentencepiece() -> tokenizers.Tokenizer:
    """Like Llama 2's: a word at the text's beginning has the tokens of a word after a space, and BOS comes before it."""
    tokenizer = _whole_words("▁", pre_tokenizers.Metaspace(), decoders.Metaspace())
    tokenizer.add_special_tokens(["<s>"])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


def _whole_words(space: str, splits: pre_tokenizers.PreTokenizer, joins: decoders.Decoder) -> tokenizers.Tokenizer:
    """Every letter is a token, and every word after a space, merged letter by letter."""
    vocabulary: dict[str, int] = {}
    merges: dict[tuple[str, str], None] = {}
    for letter in [space, *"abcdefghijklmnopqrstuvwxyzThe"]:
        vocabulary.setdefault(letter, len(vocabulary))
    for word in WORDS:
        so_far = space
        for letter in word:
            merges[(so_far, letter)] = None
            so_far += letter
            vocabulary.setdefault(so_far, len(vocabulary))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, list(merges)))
    tokenizer.pre_tokenizer = splits
    tokenizer.decoder = joins
    return tokenizer
