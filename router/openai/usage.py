"""What a request used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.router.openai.choice import Choice
from tandem.router.openai.plan import GenerationPlan


def usage(plan: GenerationPlan, choices: Sequence[Choice]) -> dict[str, Any]:
    """A prompt counts once, however many choices it has; every generated token counts, also of choices that
    best_of threw away."""
    completion = 0 if plan.only_echo else sum(choice.completion_tokens for choice in choices)
    cached = sum(
        choices[first].life.cached_tokens or 0 for first in range(0, len(choices), plan.choices_per_prompt)
    )
    figures: dict[str, Any] = {
        "prompt_tokens": plan.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": plan.prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if (reasoning := plan.reasoning_tokens(choices)) is not None:
        figures["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return figures
