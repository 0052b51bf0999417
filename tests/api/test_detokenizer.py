from __future__ import annotations

from functools import cache

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from tandem.api.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


def pieces(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special=skip_special)
    return [*(detokenizer.push([token]) for token in ids), detokenizer.finish()]


def test_an_incomplete_character_waits_and_is_shown_as_such_only_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀", special=False)[:-1]
    out = pieces(tokenizer, ids)
    assert out[0] == "a"
    assert all(piece == "" for piece in out[1:-1])
    assert out[-1] == REPLACEMENT


def test_special_tokens_are_left_out_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("fox<|end|>", special=False)
    assert "".join(pieces(tokenizer, ids)) == "fox"
    assert "".join(pieces(tokenizer, ids, skip_special=False)) == "fox<|end|>"


def test_ids_outside_the_vocabulary_say_nothing(tokenizer: Tokenizer) -> None:
    assert "".join(pieces(tokenizer, [tokenizer.vocab_size + 5, -1])) == ""


def in_portions(tokenizer: Tokenizer, ids: list[int], data: st.DataObject) -> str:
    detokenizer = tokenizer.detokenizer()
    out, rest = "", ids
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        out += detokenizer.push(rest[:count])
        rest = rest[count:]
    return out + detokenizer.finish()


@given(data=st.data())
def test_any_tokens_in_any_portions_give_what_decoding_them_at_once_gives(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert in_portions(tokenizer, ids, data) == tokenizer.decode(ids, skip_special=True)


@pytest.fixture(scope="module")
def metaspace() -> Tokenizer:
    """A tokenizer like SentencePiece models': words begin with ▁, and rare characters fall back to bytes."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split("▁▁▁▁", "isolated")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=[*"abcdefghijklmnopqrstuvwxyz▁"],
        limit_alphabet=40,
        show_progress=False,
    )
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 3, trainer)
    backend.add_tokens([tokenizers.AddedToken(f"<0x{byte:02X}>", normalized=False) for byte in range(256)])
    return Tokenizer(backend, {})


def test_another_kind_of_tokenizer_holds_bytes_until_they_are_a_character(metaspace: Tokenizer) -> None:
    word = metaspace.encode("fox", special=False)
    byte_ids = byte_tokens(metaspace, "é".encode())
    out = pieces(metaspace, word + byte_ids)
    assert "".join(out) == "foxé"
    cut = pieces(metaspace, word + byte_ids[:1])
    assert "".join(cut[:-1]) == "fox"
    assert cut[-1] == REPLACEMENT


@cache
def bytes_of(metaspace: Tokenizer) -> dict[bytes, int]:
    return {metaspace.token_bytes(token): token for token in range(metaspace.vocab_size)}


def byte_tokens(metaspace: Tokenizer, data: bytes) -> list[int]:
    return [bytes_of(metaspace)[bytes([byte])] for byte in data]


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"\n\xc3", "\n" + REPLACEMENT),
        (b"&\x83", "&" + REPLACEMENT),
        ("é".encode() + b"\xf0\x9f", "é" + REPLACEMENT),
        ("\n😀".encode(), "\n😀"),
    ],
)
def test_another_kind_of_tokenizer_goes_on_behind_bytes_that_are_no_character(
    metaspace: Tokenizer, data: bytes, shown: str
) -> None:
    ids = [*byte_tokens(metaspace, data), *metaspace.encode("the fox", special=False)]
    assert "".join(pieces(metaspace, ids)) == shown + " the fox"
    fox = metaspace.encode("fox", special=False)
    assert "".join(pieces(metaspace, fox + ids)) == "fox" + shown + " the fox"


@given(text=st.text())
def test_another_kind_of_tokenizer_streams_any_text(metaspace: Tokenizer, text: str) -> None:
    assert "".join(pieces(metaspace, byte_tokens(metaspace, text.encode()))) == text


@given(data=st.data())
def test_another_kind_of_tokenizer_says_the_same_of_any_tokens_in_any_portions(
    metaspace: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, metaspace.vocab_size + 2), max_size=30))
    assert in_portions(metaspace, ids, data) == "".join(pieces(metaspace, ids))
