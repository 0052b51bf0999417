from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import ConfigurationError
from tandem.loadgen.vocabulary import GuessedVocabulary, IdVocabulary, TextVocabulary, Vocabulary, words_for
from tandem.loadgen.workload import Lengths, multi_turn, random_prompts, shared_prefix
from tests.loadgen.made_tokenizers import byte_level, sentencepiece, shared_beginning

BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()
TEXT = {backend: TextVocabulary(backend) for backend in (BYTE_LEVEL, SENTENCEPIECE)}
MAKERS = pytest.mark.parametrize("backend", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte level", "sentencepiece"])


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def counted(backend: tokenizers.Tokenizer, prompt: object) -> int:
    """As a server counts: with what its tokenizer adds."""
    assert isinstance(prompt, str)
    return len(backend.encode(prompt).ids)


@MAKERS
@pytest.mark.parametrize("tokens", [6, 17, 512])
def test_a_prompt_as_text_has_exactly_the_tokens_asked_for(backend: tokenizers.Tokenizer, tokens: int) -> None:
    vocabulary = TextVocabulary(backend)
    prompt = vocabulary.prompt(vocabulary.draw(rng(), words_for(vocabulary, tokens)))
    assert counted(backend, prompt) == tokens


def test_a_prompt_as_ids_is_counted_by_nobody_else() -> None:
    vocabulary = IdVocabulary(SENTENCEPIECE)
    prompt = vocabulary.prompt(vocabulary.draw(rng(), words_for(vocabulary, 33)))
    assert len(prompt) == 33
    assert all(SENTENCEPIECE.id_to_token(token).startswith("▁") for token in prompt)


def test_a_tokenizer_without_whole_words_and_a_prompt_shorter_than_what_every_prompt_has_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least"):
        words_for(TextVocabulary(SENTENCEPIECE), 1)
    letters = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    with pytest.raises(ConfigurationError, match="words of one token"):
        TextVocabulary(letters)


@MAKERS
@given(seed=st.integers(0, 1000), spread=st.floats(0, 0.9))
def test_lengths_stay_within_their_spread_and_are_what_the_prompts_have(
    backend: tokenizers.Tokenizer, seed: int, spread: float
) -> None:
    sessions = random_prompts(TEXT[backend], rng(seed), 3, Lengths(80, 20, spread))
    for session in sessions:
        (turn,) = session.turns
        assert counted(backend, turn.prompt) == turn.prompt_tokens
        assert int(80 * (1 - spread)) <= turn.prompt_tokens <= 80 * (1 + spread) + 1
        assert max(1, int(20 * (1 - spread))) <= turn.max_tokens <= 20 * (1 + spread) + 1


def test_the_same_seed_makes_the_same_prompts_and_random_ones_share_no_cache_block() -> None:
    vocabulary = TextVocabulary(BYTE_LEVEL)
    first, again, other = (random_prompts(vocabulary, rng(s), 4, Lengths(50, 5, 0.5)) for s in (1, 1, 2))
    assert first == again
    assert not {s.turns[0].prompt for s in first} & {s.turns[0].prompt for s in other}
    prompts = [s.turns[0].prompt for s in random_prompts(IdVocabulary(BYTE_LEVEL), rng(), 20, Lengths(64, 5))]
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 20


@MAKERS
def test_shared_prefixes_are_shared_to_the_token_and_taken_in_turn(backend: tokenizers.Tokenizer) -> None:
    sessions = shared_prefix(TextVocabulary(backend), rng(), 6, Lengths(20, 5), prefix_tokens=100, prefixes=2)
    ids = [backend.encode(str(session.turns[0].prompt)).ids for session in sessions]
    assert [len(each) for each in ids] == [120] * 6
    assert len({tuple(each) for each in ids}) == 6
    assert len({tuple(each[:100]) for each in ids}) == 2
    assert ids[0][:100] == ids[2][:100] == ids[4][:100]
    assert shared_beginning(ids[0], ids[1]) < 16


@MAKERS
def test_a_conversation_grows_by_what_each_turn_adds(backend: tokenizers.Tokenizer) -> None:
    vocabulary = TextVocabulary(backend)
    (session,) = multi_turn(vocabulary, rng(), 1, Lengths(30, 5), turns=3, turn_tokens=12, think_s=0.5)
    first, second, third = session.turns
    assert counted(backend, first.prompt) == 30
    assert counted(backend, f"{first.prompt}{second.prompt}") == 42
    assert counted(backend, f"{first.prompt}{second.prompt}{third.prompt}") == 54
    assert (first.wait_s, second.wait_s, third.wait_s) == (0.0, 0.5, 0.5)


@pytest.mark.parametrize(
    "make",
    [
        lambda v: Lengths(0, 5),
        lambda v: Lengths(5, 0),
        lambda v: Lengths(5, 5, 1.0),
        lambda v: Lengths(5, 5, -0.1),
        lambda v: shared_prefix(v, rng(), 1, Lengths(5, 5), prefix_tokens=50, prefixes=0),
        lambda v: multi_turn(v, rng(), 1, Lengths(5, 5), turns=0, turn_tokens=5, think_s=0),
        lambda v: multi_turn(v, rng(), 1, Lengths(5, 5), turns=2, turn_tokens=0, think_s=0),
        lambda v: multi_turn(IdVocabulary(BYTE_LEVEL), rng(), 1, Lengths(30, 5), turns=2, turn_tokens=12, think_s=0),
    ],
)
def test_workloads_that_make_no_sense_are_refused(make: Callable[[Vocabulary], object]) -> None:
    with pytest.raises(ConfigurationError):
        make(GuessedVocabulary())
