"""What is asked. A workload is a list of sessions; a session is asked turn by turn, each after the last's answer."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.loadgen.api import Prompt


@dataclass(frozen=True, slots=True)
class Turn:
    """The first turn's prompt stands alone; a later one's is what it adds to the conversation so far."""

    prompt: Prompt
    prompt_tokens: int  # of `prompt` alone; the server's count replaces it
    max_tokens: int
    wait_s: float = 0.0  # the user thinks, before asking


@dataclass(frozen=True, slots=True)
class Session:
    turns: tuple[Turn, ...]
    arrival_s: float | None = None  # recorded, from the trace's beginning


def single(prompt: Prompt, prompt_tokens: int, max_tokens: int, arrival_s: float | None = None) -> Session:
    return Session((Turn(prompt, prompt_tokens, max_tokens),), arrival_s)
