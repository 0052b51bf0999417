"""How a request wants its tokens chosen, and how it ends."""

from __future__ import annotations

import enum

import msgspec


class RepetitionDetection(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Ends an answer whose last tokens repeat one pattern at least `min_count` times in a row."""

    max_pattern_size: int  # tokens
    min_pattern_size: int = 1
    min_count: int = 2


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The router checks these against the API's limits. Nodes trust the ranges, but not the sizes.

    `seed` is always set: the router draws one for a request that has none, so that any node continues the request
    exactly. A token's noise is a function of (seed, position) alone.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy: exact argmax
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    bad_words: list[list[int]] = []  # token sequences that the answer must not complete
    stop_token_ids: list[int] = []  # besides the model's own end-of-sequence tokens
    ignore_eos: bool = False
    seed: int = 0
    logprobs: int | None = None  # how many alternatives besides the chosen token; None is off
    prompt_logprobs: int | None = None
    # The grammar that the answer must follow, in llguidance's Lark dialect: a JSON schema is `start: %json {...}`.
    grammar: str | None = None
    repetition_detection: RepetitionDetection | None = None
    # Write the prompt's hidden states to a file of this name, which may begin with the folder of the key that asks.
    hidden_states: str | None = None


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-sequence or stop token was sampled, or the answer repeats itself
    LENGTH = "length"  # max_tokens or the context is used up
    HANDOFF = "handoff"  # the prefill node is done, and the decode node goes on: not the request's end
    ABORT = "abort"  # cancelled
    ERROR = "error"  # the chunk's `error` says why


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the token there, and the best alternatives."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    top: list[tuple[int, float]] = []
