"""What every engine is asked to do, and what came of it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

MAX_MODEL_LEN = 4608
MAX_BATCHED_TOKENS = 2048


class Work(msgspec.Struct, frozen=True):
    model: str
    dtype: str
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    repeats: int  # of each prefill
    decode_steps: int
    prefill: list[list[int]]  # prompts, each alone
    decode: list[list[list[int]]]  # batches of prompts, each as long as its context


class Times(msgspec.Struct):
    prefill: dict[int, float]  # prompt length -> seconds
    decode: dict[tuple[int, int], float]  # batch, context -> seconds a step


def random_work(
    model: str,
    dtype: str,
    vocab_size: int,
    max_model_len: int,
    prefills: Sequence[int],
    decodes: Sequence[tuple[int, int]],
    repeats: int,
    decode_steps: int,
) -> Work:
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(length)]

    return Work(
        model=model,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        max_num_seqs=max(batch for batch, _ in decodes),
        repeats=repeats,
        decode_steps=decode_steps,
        prefill=[prompt(length) for length in prefills],
        decode=[[prompt(context) for _ in range(batch)] for batch, context in decodes],
    )
