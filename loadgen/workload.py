"""A workload is a list of sessions. A session's turns are sent one by one, each after the answer to the last."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tandem.base.errors import ConfigurationError
from tandem.loadgen.api import Prompt
from tandem.loadgen.vocabulary import Vocabulary, words_for

MOST_TOKENS = 1 << 24  # of a prompt or an answer: ten times the longest contexts of models
MOST_REQUESTS = 10_000_000


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """The first turn's prompt is whole; a later turn's prompt is what it adds to the conversation so far."""

    prompt: Prompt
    prompt_tokens: int  # of `prompt` alone; the server's count replaces it
    max_tokens: int
    wait_s: float = 0.0  # the user's pause before the turn


@dataclass(frozen=True, slots=True)
class Session:
    turns: tuple[SessionTurn, ...]
    arrival_s: float | None = None  # from the trace's beginning; None for synthetic sessions


def single(prompt: Prompt, prompt_tokens: int, max_tokens: int, arrival_s: float | None = None) -> Session:
    return Session((SessionTurn(prompt, prompt_tokens, max_tokens),), arrival_s)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a prompt and of its answer. `spread` 0.2 draws each evenly from 80% to 120% of the mean."""

    input: int
    output: int
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not (1 <= self.input <= MOST_TOKENS and 1 <= self.output <= MOST_TOKENS):
            raise ConfigurationError(
                f"a prompt and an answer must have at least 1 token each, and at most {MOST_TOKENS:,}, not {self.input} and {self.output}"
            )
        if not 0.0 <= self.spread < 1.0:
            raise ConfigurationError(f"the lengths' spread must be at least 0 and below 1, not {self.spread:g}")

    def draw_input(self, rng: np.random.Generator) -> int:
        return self._draw(rng, self.input)

    def draw_output(self, rng: np.random.Generator) -> int:
        return self._draw(rng, self.output)

    def _draw(self, rng: np.random.Generator, mean: int) -> int:
        low = max(1, math.floor(mean * (1 - self.spread)))
        return int(rng.integers(low, math.ceil(mean * (1 + self.spread)) + 1))


def random_prompts(vocabulary: Vocabulary, rng: np.random.Generator, count: int, lengths: Lengths) -> list[Session]:
    """Returns prompts that have nothing in common."""
    sessions = []
    for _ in range(count):
        tokens = lengths.draw_input(rng)
        prompt = vocabulary.prompt(vocabulary.draw(rng, words_for(vocabulary, tokens)))
        sessions.append(single(prompt, tokens, lengths.draw_output(rng)))
    return sessions


def shared_prefix(
    vocabulary: Vocabulary, rng: np.random.Generator, count: int, lengths: Lengths, prefix_tokens: int, prefixes: int
) -> list[Session]:
    """Returns prompts that begin with one of a few prefixes, in turn. `lengths.input` counts what follows the prefix."""
    if prefixes < 1:
        raise ConfigurationError("there must be at least 1 shared prefix")
    heads = [vocabulary.draw(rng, words_for(vocabulary, prefix_tokens)) for _ in range(prefixes)]
    sessions = []
    for index in range(count):
        own = lengths.draw_input(rng)
        prompt = vocabulary.prompt([*heads[index % prefixes], *vocabulary.draw(rng, own)])
        sessions.append(single(prompt, prefix_tokens + own, lengths.draw_output(rng)))
    return sessions


def multi_turn(
    vocabulary: Vocabulary,
    rng: np.random.Generator,
    count: int,
    lengths: Lengths,
    turns: int,
    turn_tokens: int,
    think_s: float,
) -> list[Session]:
    """Returns conversations. The first prompt has `lengths.input` tokens; each later turn adds the answer and `turn_tokens` tokens."""
    if turns < 1 or turn_tokens < 1:
        raise ConfigurationError("a conversation must have at least 1 turn, and a turn at least 1 token")
    sessions = []
    for _ in range(count):
        tokens = lengths.draw_input(rng)
        opening = vocabulary.prompt(vocabulary.draw(rng, words_for(vocabulary, tokens)))
        asked = [SessionTurn(opening, tokens, lengths.draw_output(rng))]
        for _ in range(turns - 1):
            said = vocabulary.continuation(vocabulary.draw(rng, turn_tokens))
            asked.append(SessionTurn(said, turn_tokens, lengths.draw_output(rng), wait_s=think_s))
        sessions.append(Session(tuple(asked)))
    return sessions
