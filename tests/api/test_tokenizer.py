"""A text that is tokenized in parts always gets the ids that it gets as a whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from tandem.api.text.segment_cache import LEAST_CHARACTERS, SegmentCache
from tandem.api.text.tenant_cache import CacheOwner, TenantCache
from tandem.api.text.tokenizer import INLINE_CHARACTERS, Tokenizer
from tandem.api.text.word_cache import _PATTERNS, MOST_NEW_WORDS, WordCache, keeps_words
from tandem.base.errors import ConfigurationError
from tests.small_model import CORPUS, CountedBackend

MARKS = ["<|start|>", "<|start|>user", "<|end|>", "<s>", " <tool>", "</think>"]
KINDS = {
    "byte level": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "byte level, a space in front": lambda: pre_tokenizers.ByteLevel(add_prefix_space=True),
    "metaspace, first": lambda: pre_tokenizers.Metaspace(prepend_scheme="first"),
    "metaspace, always": lambda: pre_tokenizers.Metaspace(prepend_scheme="always"),
    "words": lambda: pre_tokenizers.BertPreTokenizer(),
    "digits": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]),
}
NORMALIZERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "lower": normalizers.Lowercase,
    "NFC": normalizers.NFC,
    "prepend": lambda: normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    "strip": normalizers.Strip,
}


@cache
def backend(kind: str, normalizer: str, strips: bool) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    made.pre_tokenizer = KINDS[kind]()
    if (normal := NORMALIZERS[normalizer]()) is not None:
        made.normalizer = normal
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([*CORPUS, "user assistant 12 345 tool think"], trainer)
    for mark in MARKS:
        special = mark != "</think>"
        made.add_tokens([AddedToken(mark, special=special, normalized=False, lstrip=strips and mark == "<s>", rstrip=strips and mark == "<|end|>")])  # fmt: skip
    made.add_tokens([AddedToken("lazy dog", normalized=True)])
    return made


def whole(made: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
    return [found.ids for found in made.encode_batch_fast(texts, add_special_tokens=False)]


TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            [*MARKS, "<|", "|>", "<|start", "start|>", "<", " ", "  ", "\n", "Lazy Dog", "lazy dog", "é", "▁"]
        ),
        st.text(alphabet="ab <|>sté12\n", max_size=8),
        st.just("the quick brown fox jumps over the lazy dog and then it sleeps until the sun comes up "),
    ),
    max_size=14,
).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=35, deadline=None)
@given(
    normalizer=st.sampled_from(sorted(NORMALIZERS)), strips=st.booleans(), texts=st.lists(TEXTS, min_size=1, max_size=4)
)
def test_the_ids_are_those_of_the_whole_text(kind: str, normalizer: str, strips: bool, texts: list[str]) -> None:
    made = backend(kind, normalizer, strips)
    known = SegmentCache(made, lambda parts, _: whole(made, parts), 1 << 20)
    for text in [*texts, *texts, "".join(texts)]:  # cold, known, and a later turn
        assert "".join(known.segments(text)) == text
        assert known.encode(text) == whole(made, [text])[0]


def test_only_what_is_new_is_tokenized() -> None:
    made = backend("byte level", "none", False)
    asked: list[str] = []

    def encode(texts: list[str], tenant: str) -> list[list[int]]:
        asked.extend(texts)
        return whole(made, texts)

    known = SegmentCache(made, encode, 1 << 20)
    turns = [f"<|start|>user\n{index} {'the fox ' * LEAST_CHARACTERS}<|end|>" for index in range(4)]
    known.encode("".join(turns[:3]))
    asked.clear()
    known.encode("".join(turns))
    assert [text for text in asked if len(text) > LEAST_CHARACTERS] == [turns[3].removesuffix("<|end|>")]


def test_it_keeps_no_more_than_it_may() -> None:
    made = backend("byte level", "none", False)
    known = SegmentCache(made, lambda texts, _: whole(made, texts), 10_000)
    for index in range(50):
        known.encode(f"a<|start|>{index} {'fox ' * 100}<|start|>b")
    assert 0 < known.size <= 10_000
    known.encode(f"a<|start|>{'fox ' * 10_000}<|start|>b")
    assert 0 < known.size <= 10_000


ALICE, BOB = CacheOwner("alice", "alice"), CacheOwner("bob", "bob")


def test_what_one_tenant_asked_is_known_to_no_other() -> None:
    made = backend("byte level", "none", False)
    asked: list[tuple[str, int]] = []

    def encode(texts: list[str], tenant: str) -> list[list[int]]:
        asked.append((tenant, len(texts)))
        return whole(made, texts)

    known = SegmentCache(made, encode, 1 << 20)
    text = "the fox " * LEAST_CHARACTERS
    salted = CacheOwner("alice", "alice/of her own")
    for owner in (ALICE, ALICE, BOB, salted, BOB, ALICE, salted):
        assert known.encode(text, owner) == whole(made, [text])[0]
    assert asked == [("alice", 1), ("bob", 1), ("alice", 1)]


def test_no_tenant_pushes_out_what_another_with_less_has() -> None:
    cache: TenantCache[int, str] = TenantCache(100)
    for key in range(3):
        cache.put(BOB, key, "bob's", 10)
    for key in range(1000):
        cache.put(CacheOwner("alice", str(key)), key, "alice's", 7)
        assert cache.size <= 100
    assert [cache.get(BOB, key) for key in range(3)] == ["bob's"] * 3
    assert cache.get(CacheOwner("alice", "999"), 999) == "alice's"
    for key in range(1000):
        cache.put(CacheOwner(str(key), ""), key, "a stranger's", 1)
    assert cache.size <= 100, "also for tenants without end"


def test_a_word_of_its_own_forbids_every_cut() -> None:
    made = tokenizers.Tokenizer(models.BPE())
    made.add_tokens([AddedToken("<|start|>", special=True, normalized=False), AddedToken("yes", single_word=True)])
    known = SegmentCache(made, lambda texts, _: whole(made, texts), 1 << 20)
    assert known.segments("a<|start|>b") == ["a<|start|>b"]


async def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return await tokenizer.encode_async(text, special=False)


def test_the_tokenizer_does_so_with_long_prompts(model_folder: str) -> None:
    import asyncio

    backend: Any = CountedBackend(model_folder)
    tokenizer = Tokenizer(backend, {})
    text = "".join(f"<|start|>user\nturn {index} {'the fox ' * 100}<|end|>\n" for index in range(5))
    assert len(text) > INLINE_CHARACTERS
    whole = tokenizer.encode(text, special=False)
    assert asyncio.run(_encoded(tokenizer, text)) == whole
    backend.texts.clear()
    assert asyncio.run(_encoded(tokenizer, text)) == whole
    assert sum(map(len, backend.texts)) < len(text) / 10


@pytest.mark.parametrize("special", [True, False])
def test_a_short_prompt_that_was_tokenized_is_not_again(model_folder: str, special: bool) -> None:
    import asyncio

    backend: Any = CountedBackend(model_folder)
    tokenizer = Tokenizer(backend, {})
    text = f"a prompt that is asked twice, and {special} {'the fox ' * 20}"
    first = asyncio.run(tokenizer.encode_async(text, special=special))
    assert backend.texts
    backend.texts.clear()
    again = asyncio.run(tokenizer.encode_async(text, special=special))
    assert not backend.texts
    assert first == again == tokenizer.encode(text, special=special)
    assert first is not again, "each request has a list of its own"


# --- words


def byte_level(cutting: pre_tokenizers.PreTokenizer, *, normalizer: str = "none") -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = cutting
    if (normal := NORMALIZERS[normalizer]()) is not None:
        made.normalizer = normal
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([*CORPUS, "user assistant's 12 345 tool. think, the  fox\n can't"], trainer)
    made.add_tokens([AddedToken("<|start|>", special=True, normalized=False), AddedToken("</think>")])
    return made


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


@cache
def kept_by_words() -> list[tokenizers.Tokenizer]:
    """One of each kind that is cut into words."""
    return [
        byte_level(KINDS["byte level"]()),
        byte_level(KINDS["digits"]()),
        byte_level(KINDS["byte level"](), normalizer="NFC"),
        *(byte_level(split_by(pattern)) for pattern in sorted(_PATTERNS)),
        *(byte_level(split_by(pattern), normalizer="NFC") for pattern in sorted(_PATTERNS)),
    ]


SPACES = ["  ", "\n", "\n ", " \n", "\r\n", "\t", "\u00a0", "\u2003", "\u3000", "\u1680", "\u180e", "\x1c", "\x85", "\u200b"]  # fmt: skip
WORDS = ["the", "fox", "can't", "'S", "I'LL", "12", "3456", "a.b", "...", "x)", "é", "e\u0301", "\u0301", "ж", "한국", "日本", "🦊", "ſ", "²", "<|start|>", "<|st", "</think>", "</", "nothing-that-is-short-enough-to-be-kept"]  # fmt: skip
WORDY = st.lists(
    st.one_of(
        st.just(" "),
        st.sampled_from(SPACES),
        st.sampled_from(WORDS),
        st.text(max_size=3),
        st.just("the quick brown fox, jumps over "),
    ),
    max_size=24,
).map("".join)


@pytest.mark.parametrize("kind", range(9))
@settings(max_examples=35, deadline=None)
@given(texts=st.lists(WORDY, min_size=1, max_size=3))
def test_the_ids_of_words_are_those_of_the_whole_text(kind: int, texts: list[str]) -> None:
    made = kept_by_words()[kind]
    assert keeps_words(made)
    known = WordCache(lambda words: whole(made, words))
    for text in [*texts, *texts, " ".join(texts)]:
        assert known.encode(text) == whole(made, [text])[0]


def noted(made: tokenizers.Tokenizer) -> tuple[WordCache, list[str]]:
    """A cache, and what it had to have tokenized."""
    asked: list[str] = []

    def encode(texts: list[str]) -> list[list[int]]:
        asked.extend(texts)
        return whole(made, texts)

    return WordCache(encode), asked


def test_words_that_came_before_are_not_tokenized_again() -> None:
    made = kept_by_words()[0]
    known, asked = noted(made)
    known.encode("the lazy fox sleeps")
    asked.clear()
    assert known.encode("the fox sleeps, the lazy one") == whole(made, ["the fox sleeps, the lazy one"])[0]
    assert asked == ["the", " sleeps,", " the", " one"]


def test_words_of_one_tenant_are_new_from_another() -> None:
    known, asked = noted(kept_by_words()[0])
    known.encode("the lazy fox", "alice")
    asked.clear()
    known.encode("the lazy fox", "bob")
    assert asked == ["the", " lazy", " fox"]
    asked.clear()
    known.encode("the lazy fox", "alice")
    assert asked == []


def test_the_tenant_with_most_words_forgets_them_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.api.text.word_cache.MOST_WORDS", 20)
    known, asked = noted(kept_by_words()[0])
    known.encode("the lazy fox", "bob")
    for index in range(40):
        known.encode(f"the fox{index} jumps", "alice")
    asked.clear()
    known.encode("the lazy fox", "bob")
    assert asked == []


def test_a_text_of_new_words_is_tokenized_as_a_whole_and_some_of_them_are_learned() -> None:
    made = kept_by_words()[0]
    known, asked = noted(made)
    text = "the " + " ".join(f"word{index}" for index in range(3 * MOST_NEW_WORDS))
    for learned in (*[1 + MOST_NEW_WORDS] * 3, 0):
        asked.clear()
        assert known.encode(text) == whole(made, [text])[0]
        assert len(asked) == learned


def test_words_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.api.text.word_cache.MOST_WORDS", 20)
    made = kept_by_words()[0]
    known, asked = noted(made)
    for index in [*range(30), 0]:
        asked.clear()
        text = f"a fox{index} and a dog{index} jump"
        assert known.encode(text) == whole(made, [text])[0]
        assert f" fox{index}" in asked


@pytest.mark.parametrize(
    "cutting",
    [
        KINDS["byte level, a space in front"],
        KINDS["metaspace, first"],
        KINDS["words"],
        lambda: split_by(r"[^ ]+ ?"),  # a piece ends with the space
        lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        lambda: None,
    ],
)
def test_other_tokenizers_keep_no_words(cutting: Callable[[], pre_tokenizers.PreTokenizer]) -> None:
    assert not keeps_words(byte_level(cutting()))


@pytest.mark.parametrize(
    "token",
    [AddedToken("lazy dog"), AddedToken("<s>", lstrip=True), AddedToken("<s>", rstrip=True), AddedToken("yes", single_word=True)],
)  # fmt: skip
def test_an_added_token_that_looks_at_spaces_forbids_words(token: AddedToken) -> None:
    made = byte_level(KINDS["byte level"]())
    made.add_tokens([token])
    assert not keeps_words(made)


def test_a_normalizer_that_may_make_spaces_forbids_words() -> None:
    assert not keeps_words(byte_level(KINDS["byte level"](), normalizer="lower"))
    assert not keeps_words(byte_level(KINDS["byte level"](), normalizer="strip"))


def test_a_tokenizer_s_own_code_never_runs_whatever_the_terminal_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks on the terminal unless it is told."""
    monkeypatch.setattr("builtins.input", lambda prompt="": "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    settings = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(ConfigurationError, match="has no tokenizer"):
        Tokenizer.from_folder(str(tmp_path))
    assert not (tmp_path / "ran").exists()
