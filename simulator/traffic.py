"""The requests of a simulation: from a recorded trace, or drawn at random. A prompt's tokens are the names of its blocks. A name stands
for a block's text and all text before it, so the hash ids of a trace serve as the hashes by which caches and routers know blocks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from tandem.base.errors import ConfigurationError
from tandem.cluster.replay.reading import TracedStep
from tandem.engine.cache.hashing import BlockHasher, HashedContent
from tandem.engine.request import Request
from tandem.loadgen.load import poisson
from tandem.loadgen.traces import MOONCAKE_BLOCK_TOKENS, TraceRow, refuse_too_long
from tandem.loadgen.workload import MOST_REQUESTS, MOST_TOKENS, Lengths

# The first tokens of unique texts, of prompts and of answers. They lie above all hash ids of a trace; a token has 32 bits.
OWN_TEXT = 1 << 30
ANSWERS = 1 << 31
COPY_SHIFT_S = 60.0
PREFIX_BLOCK = 16  # tokens that one name of a shared prefix stands for
MOST_SECONDS = 366 * 86_400
MOST_PREFIX_TOKENS = 1 << 30  # of all shared prefixes together


@dataclasses.dataclass(frozen=True, slots=True)
class PlayedTraffic:
    rows: Sequence[TraceRow]  # in order of arrival
    block_tokens: int = MOONCAKE_BLOCK_TOKENS  # how many tokens one name of a row's blocks stands for

    @property
    def seconds(self) -> float:
        return self.rows[-1].arrival_s if self.rows else 0.0

    def prompt(self, index: int) -> list[int]:
        """The prompt's tokens: each is the name of its block, or, after the named blocks, a token unique to the request."""
        row, size = self.rows[index], self.block_tokens
        tokens = [OWN_TEXT + index] * row.input_tokens
        for start, name in zip(range(0, row.input_tokens, size), row.blocks, strict=False):
            tokens[start : start + size] = [name] * min(size, row.input_tokens - start)
        return tokens


@dataclasses.dataclass(slots=True)
class _SeenRequest:
    came_at: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0  # its length when the trace last showed it
    has_ended: bool = False


def rows_of_steps(steps: Iterable[TracedStep]) -> list[TraceRow]:
    """The requests of a node's scheduler trace, by arrival. A prompt is shortened by the tokens that the node found in its prefix cache,
    because the trace does not say which tokens these were."""
    seen: dict[tuple[int, str], _SeenRequest] = {}
    starts = 0
    header = None
    for step in steps:
        if step.header != header:
            header, starts = step.header, starts + 1  # the node was started again
        clock = header.unix_time - header.clock if header is not None else 0.0
        snapshot = step.snapshot
        for one in (*snapshot.running, *snapshot.waiting, *snapshot.blocked):
            request = seen.setdefault((starts, one.request_id), _SeenRequest(clock + snapshot.at - one.waited_s))
            request.tokens = max(request.tokens, one.tokens)
        for event in step.prefixes:
            found = seen.get((starts, event.request_id))
            if found is not None and not found.prompt_tokens:
                found.prompt_tokens, found.cached_tokens = event.prompt_tokens, event.local_tokens
        for name in step.decision.finished:
            if (ended := seen.get((starts, name))) is not None:
                ended.has_ended = True
    admitted = [request for request in seen.values() if request.prompt_tokens]
    if not admitted:
        raise ConfigurationError("the scheduler trace has no request that was admitted")
    first = min(request.came_at for request in admitted)
    rows = [
        TraceRow(
            request.came_at - first,
            max(request.prompt_tokens - request.cached_tokens, 1),
            # The trace last shows a request before its last token.
            max(request.tokens - request.prompt_tokens + request.has_ended, 1),
        )
        for request in admitted
    ]
    return sorted(rows, key=lambda row: row.arrival_s)


class NameHasher(BlockHasher):
    """Hashes a block as its last token and its index: the token is the name of the text up to there. An answer's tokens are unique to it."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size, bytes, b"")

    def extend(self, chain: list[bytes], request: HashedContent) -> None:
        size, tokens = self.block_size, request.all_token_ids
        for index in range(len(chain), len(tokens) // size):
            chain.append((tokens[(index + 1) * size - 1] << 32 | index).to_bytes(10, "little"))


class RecordedTraffic(msgspec.Struct, frozen=True):
    """How a trace is played. With `copies`, several copies play at once: each has its own prompts and is shifted by up to a minute."""

    speed: Annotated[float, Meta(gt=0)] = 1.0
    scale: Annotated[float, Meta(gt=0)] = 1.0
    copies: Annotated[int, Meta(ge=1)] = 1

    def __post_init__(self) -> None:
        if not (0 < self.speed < math.inf and 0 < self.scale < math.inf) or self.copies < 1:
            raise ConfigurationError(
                "a trace is played with a --trace-speed and a --trace-scale above 0, in at least 1 of its --copies, not "
                f"{self.speed:g}, {self.scale:g} and {self.copies}"
            )

    def of(self, rows: Sequence[TraceRow], seed: int = 0) -> PlayedTraffic:
        _refuse_too_much(self.copies * len(rows), max((row.arrival_s for row in rows), default=0.0) / self.speed)
        refuse_too_long(rows, self.scale)
        if wrong := [row for row in rows if row.input_tokens < 1 or row.output_tokens < 0]:
            raise ConfigurationError(
                f"the trace has a request with a prompt of {wrong[0].input_tokens} tokens and an answer of "
                f"{wrong[0].output_tokens}: a prompt has at least 1, an answer at least 0"
            )
        names = 1 + max((max(row.blocks, default=0) for row in rows), default=0)
        if names * self.copies > OWN_TEXT or any(min(row.blocks, default=0) < 0 for row in rows):
            raise ConfigurationError(
                f"the trace's hash ids must be from 0 to {OWN_TEXT // self.copies - 1}, with {self.copies} of its --copies"
            )
        shifts = np.random.default_rng(seed).uniform(0.0, COPY_SHIFT_S, size=(self.copies, len(rows)))
        played = [
            TraceRow(
                (row.arrival_s + (float(shifts[copy, index]) if copy else 0.0)) / self.speed,
                max(1, round(row.input_tokens * self.scale)),
                max(1, round(row.output_tokens * self.scale)),
                tuple(name + copy * names for name in row.blocks),
            )
            for copy in range(self.copies)
            for index, row in enumerate(rows)
        ]
        played.sort(key=lambda row: row.arrival_s)
        return PlayedTraffic(played, max(1, round(MOONCAKE_BLOCK_TOKENS * self.scale)))


class SyntheticTraffic(msgspec.Struct, frozen=True):
    """Requests at random times. Their first `prefix` tokens are one of `prefixes` texts."""

    rate: float
    seconds: float
    input: int = 512
    output: int = 64
    spread: float = 0.0
    prefix: int = 0
    prefixes: int = 1

    def __post_init__(self) -> None:
        if not (0 < self.rate < math.inf and 0 < self.seconds < math.inf):
            raise ConfigurationError(
                f"--rate and --duration must be above 0, and finite, not {self.rate:g} requests a second and {self.seconds:g} s"
            )
        count = max(1.0, self.rate * self.seconds)
        _refuse_too_much(count, count / self.rate)
        if not 0 <= self.prefix <= MOST_TOKENS or self.prefixes < 1:
            raise ConfigurationError(
                f"--prefix must be from 0 to {MOST_TOKENS:,} tokens, and --prefixes at least 1, not {self.prefix} and {self.prefixes}"
            )
        if (distinct := min(self.prefixes, round(count)) * self.prefix) > MOST_PREFIX_TOKENS:
            raise ConfigurationError(
                f"--prefixes have {distinct:,} tokens together: at most {MOST_PREFIX_TOKENS:,} can be played"
            )

    def make(self, seed: int = 0) -> PlayedTraffic:
        rng, lengths = np.random.default_rng(seed), Lengths(self.input, self.output, self.spread)
        count = max(1, round(self.rate * self.seconds))
        blocks = self.prefix // PREFIX_BLOCK
        prefixes = [tuple(range(number * blocks, (number + 1) * blocks)) for number in range(min(self.prefixes, count))]
        rows = []
        for index, at in enumerate(poisson(rng, count, self.rate)):
            tokens = blocks * PREFIX_BLOCK + lengths.draw_input(rng)
            rows.append(TraceRow(at, tokens, lengths.draw_output(rng), prefixes[index % len(prefixes)]))
        return PlayedTraffic(rows, PREFIX_BLOCK)


def _refuse_too_much(requests: float, seconds: float) -> None:
    if not (requests <= MOST_REQUESTS and seconds <= MOST_SECONDS):
        raise ConfigurationError(
            f"the traffic has {requests:.4g} requests in {seconds:.4g} s: at most {MOST_REQUESTS:,} can be played, and {MOST_SECONDS:,} s"
        )


def next_token(request: Request) -> int:
    """Every token of an answer is the same, and unique to this answer, so no other request finds its blocks in a prefix cache."""
    if request.num_output_tokens:
        return request.all_token_ids[-1]
    return ANSWERS + (request.facts.sampling.seed or 0)
