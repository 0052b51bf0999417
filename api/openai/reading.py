"""Reads a generation to its end, for a whole answer."""

from __future__ import annotations

import io
from collections.abc import Sequence

from tandem.api.lives import FreshLives
from tandem.api.openai.answer import Choice, LoopTurn
from tandem.api.openai.generation_plan import GenerationPlan

# An answer up to these sizes is encoded within a tenth of a millisecond.
SHORT_CHARACTERS = 8 << 10
SHORT_CHOICES = 8


class ReadChoice:
    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._text = io.StringIO()

    @property
    def text(self) -> str:
        return self._text.getvalue()

    @property
    def tokens(self) -> range:
        """The output tokens whose log-probabilities are shown."""
        return self.choice.shown_tokens

    def read(self) -> None:
        delta = self.choice.advance()
        if delta is not None:
            self._text.write(delta.text)

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability per token, which best_of compares, so that long answers are not at a
        disadvantage."""
        return self.choice.life.ledger.logprobs.mean(self.choice.completion_tokens)


async def read_all(generation: FreshLives, choices: Sequence[Choice]) -> list[ReadChoice]:
    """Reads all choices to their ends. Raises the first failure, because an answer with a missing choice is
    no answer."""
    read = {choice.life: ReadChoice(choice) for choice in choices}
    unfinished = len(read)
    turn = LoopTurn()
    while unfinished:
        news = await generation.news()
        turn.begin()
        for life in news:
            one = read[life]
            was_finished = one.choice.finish_reason is not None
            one.read()
            while one.choice.behind:
                await turn.pass_on()
                one.read()
            await turn.pass_on()
            if one.choice.failed is not None:
                raise one.choice.failed
            if one.choice.finish_reason is not None and not was_finished:
                unfinished -= 1
    return list(read.values())


def are_short(plan: GenerationPlan, read: Sequence[ReadChoice]) -> bool:
    """Whether the answer is short: little text, and nothing per token."""
    if plan.show_logprobs or plan.prompt_logprobs is not None or plan.return_token_ids:
        return False
    characters = sum(map(len, plan.prompt_texts)) * plan.keep + sum(len(one.text) for one in read)
    return characters <= SHORT_CHARACTERS and len(read) <= SHORT_CHOICES


def keep_best(read: Sequence[ReadChoice], generated: int, keep: int) -> list[ReadChoice]:
    """Returns the `keep` likeliest of each prompt's `generated` choices, the best first."""
    if generated == keep:
        return list(read)
    kept: list[ReadChoice] = []
    for first in range(0, len(read), generated):
        group = sorted(read[first : first + generated], key=lambda one: one.mean_logprob, reverse=True)
        kept.extend(group[:keep])
    return kept
