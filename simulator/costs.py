"""The times that one kind of node takes for a step, a transfer and a request: measured once, then interpolated.

`tandem profile` writes them as JSON. Between two measured points a cost is linear, and beyond the last point the last line
continues. So a run of steps in which each request gets one token costs an arithmetic series, which is added up at once.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.base.errors import ConfigurationError
from tandem.wire.nodes import Role
from tandem.wire.step_costs import ALONE, TERMS, StepCosts

LEAST_STEP_S = 1e-6
DEFAULT_START_S = 30.0
EXAMPLE = Path(__file__).with_name("example.json")
"""The costs of one small node, to try the commands with before one has been measured."""

Positive = Annotated[float, Meta(gt=0)]
NotNegativeNumber = Annotated[float, Meta(ge=0)]
Slowdown = Annotated[float, Meta(ge=1)]


class CostTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The seconds of a step by its size and its context, on a grid."""

    sizes: list[float]  # tokens of a prompt's chunk, or the number of decoding requests
    contexts: list[float]  # tokens before the chunk, or before each request's next token
    seconds: list[list[float]]  # a row for each size, with a value for each context

    def __post_init__(self) -> None:
        for name, values in (("sizes", self.sizes), ("contexts", self.contexts)):
            if not values or values != sorted(set(values)) or values[0] < 0:
                raise ValueError(f"{name} must be numbers from 0 up, in order and different, not {values}")
        if len(self.seconds) != len(self.sizes) or any(len(row) != len(self.contexts) for row in self.seconds):
            raise ValueError("seconds must have a row for each size, with a number for each context")
        if not all(math.isfinite(value) and value > 0 for row in self.seconds for value in row):
            raise ValueError("seconds must be above 0")

    def at(self, size: float, context: float) -> float:
        below, above, share = _between(self.sizes, size)
        at_below = self._along(below, context)
        if share == 0.0:
            return max(at_below, LEAST_STEP_S)
        return max(at_below + share * (self._along(above, context) - at_below), LEAST_STEP_S)

    def most(self, size: float, context: float) -> float:
        """The longest time of any step up to this size and context. The table is linear between grid points, so the maximum lies at a
        grid point or at a bound of the given range."""
        sizes = [1.0, size, *(value for value in self.sizes if 1.0 < value < size)]
        contexts = [0.0, context, *(value for value in self.contexts if value < context)]
        return max(self.at(one, other) for one in sizes for other in contexts)

    def times(self, factor: float) -> CostTable:
        return CostTable(self.sizes, self.contexts, [[factor * value for value in row] for row in self.seconds])

    def _along(self, row: int, context: float) -> float:
        seconds = self.seconds[row]
        below, above, share = _between(self.contexts, context)
        return seconds[below] + share * (seconds[above] - seconds[below])

    def piece(self, size: float, context: float) -> tuple[float, float, float]:
        """Returns the linear piece that begins at `context`: the seconds there, the seconds that each further token adds, and the context
        where the piece ends."""
        index = bisect.bisect_right(self.contexts, context)
        end = self.contexts[index] if index < len(self.contexts) - 1 else math.inf
        here = self.at(size, context)
        further = min(end, context + 1024.0)
        return here, (self.at(size, further) - here) / (further - context), end


def _between(places: Sequence[float], value: float) -> tuple[int, int, float]:
    """The indexes of the two places around a value, and its share of the way between them. Beyond an end: the two places nearest to it."""
    if len(places) == 1:
        return 0, 0, 0.0
    above = min(max(bisect.bisect_right(places, value), 1), len(places) - 1)
    below = above - 1
    return below, above, (value - places[below]) / (places[above] - places[below])


class TransferCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # The fixed time after the last forward pass, however little is left to send
    handover_s: NotNegativeNumber = 0.0
    bytes_per_s: Positive = 1e10


class RequestCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The times that a request takes outside the engines."""

    arrive_s: NotNegativeNumber = 0.0  # from the client to the node's queue
    arrive_per_token_s: NotNegativeNumber = 0.0  # for each prompt token, to read, tokenize and send it
    answer_s: NotNegativeNumber = 0.0  # from the step's end to the client


class BesideCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How many times as long a node's step takes while another node computes on the same machine."""

    prefill: Slowdown = 1.0
    # And so many seconds longer takes each step that reads a prompt, however short: it reads all weights, through the memory that
    # both nodes share.
    prefill_step_s: NotNegativeNumber = 0.0
    decode: Slowdown = 1.0

    def of(self, role: Role, reads_s: float | None) -> float:
        """`reads_s`: the seconds that the step takes alone, if it reads a prompt. An aggregated node does both, so it takes the larger
        slowdown."""
        slowdown = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}.get(role, max(self.prefill, self.decode))
        return slowdown if reads_s is None else slowdown + self.prefill_step_s / reads_s


class FitError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The relative error of the costs at measured points that they were not fitted to."""

    points: int
    median: float
    worst: float

    @classmethod
    def of(cls, pairs: Iterable[tuple[float, float]]) -> FitError:
        """`pairs`: (predicted, measured)."""
        errors = sorted(abs(said / measured - 1) for said, measured in pairs)
        if not errors:
            return cls(0, 0.0, 0.0)
        return cls(len(errors), errors[len(errors) // 2], errors[-1])


class Width(msgspec.Struct, frozen=True, order=True):
    """How many ranks share a node's model."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    @property
    def ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    def __str__(self) -> str:
        stages = f" × PP {self.pipeline_parallel}" if self.pipeline_parallel > 1 else ""
        return f"TP {self.tensor_parallel}{stages}"


class CostModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The costs of one kind of node, with one model loaded."""

    name: str
    max_model_len: Annotated[int, Meta(ge=2)]
    blocks: Annotated[int, Meta(ge=2)]  # blocks in its KV cache
    block_size: Annotated[int, Meta(ge=1)]
    kv_bytes_per_token: NotNegativeNumber
    prefill: CostTable
    decode: CostTable
    transfer: TransferCost = TransferCost()
    request: RequestCost = RequestCost()
    # How much shorter one step with prompts and decodes is than a step of each.
    mixed_saved_s: NotNegativeNumber = 0.0
    beside: BesideCost = BesideCost()
    start_s: NotNegativeNumber = DEFAULT_START_S  # from a new node's launch until it serves
    tensor_parallel: Annotated[int, Meta(ge=1)] = 1
    pipeline_parallel: Annotated[int, Meta(ge=1)] = 1
    fit: dict[str, FitError] = {}

    @property
    def width(self) -> Width:
        return Width(self.tensor_parallel, self.pipeline_parallel)

    def step_s(self, chunks: Sequence[tuple[int, int]], num_decodes: int = 0, decode_context: float = 0.0) -> float:
        """The seconds of one step. `chunks`: (tokens, tokens before them) of each prompt. `decode_context`: the sum of the contexts of
        all decoding requests."""
        seconds = 0.0
        if chunks:
            tokens = sum(count for count, _ in chunks)
            pairs = sum(count * (context + count / 2) for count, context in chunks)
            seconds = self.prefill.at(tokens, max(pairs / tokens - tokens / 2, 0.0))
        if num_decodes:
            decoding = self.decode.at(num_decodes, decode_context / num_decodes)
            seconds = max(seconds + decoding - self.mixed_saved_s, seconds, decoding) if chunks else decoding
        return seconds

    def learnt(self) -> StepCosts:
        """Returns what such a node tells of steps that write: that they take so long for any number of requests."""
        one, two = self.decode.at(1, 0), self.decode.at(2, 0)
        coefficients = [0.0] * TERMS
        coefficients[ALONE] = max(2 * one - two, 0.0)
        return StepCosts(tuple(coefficients), rows_seen=1)

    def transfer_s(self, tokens: int) -> float:
        return tokens * self.kv_bytes_per_token / self.transfer.bytes_per_s


class StepBound:
    """An upper bound on the time of a node's step. `budget`: the most tokens of a step."""

    def __init__(self, costs: CostModel, budget: int) -> None:
        self._costs, self._budget = costs, budget
        self._known: dict[tuple[int, int, bool], float] = {}

    def of(self, requests: int, longest: int, reads: bool) -> float:
        """`longest`: tokens of the longest request."""
        # Rounded up to powers of two, so that there are few keys.
        key = (requests.bit_length(), longest.bit_length(), reads)
        most = self._known.get(key)
        if most is None:
            size, context = float(1 << key[0]), float(1 << key[1])
            most = LEAST_STEP_S + self._costs.decode.most(size, context)
            if reads:
                most += self._costs.prefill.most(float(self._budget), context)
            self._known[key] = most
        return most


class DecodeRun:
    """A run of steps in which the same requests get a token each. Computes when each step ends without walking through the steps."""

    __slots__ = ("_context", "_costs", "_firsts", "_growths", "_pace", "_size", "_starts", "_steps", "steps")

    def __init__(
        self, costs: CostModel, num_decodes: int, decode_context: float, steps: int, pace: float = 1.0
    ) -> None:
        """`decode_context`: the sum of the requests' contexts in the first step. `pace`: how many times as long as usual each step takes."""
        self._costs = costs.decode
        self._size = num_decodes
        self._pace = pace
        self._context = decode_context / num_decodes
        self.steps = steps
        # Linear pieces, added on demand. For each: the number of steps before it, the seconds of its first step, the seconds that
        # each further step takes more, and the time at which it starts.
        self._steps: list[int] = [0]
        self._firsts: list[float] = []
        self._growths: list[float] = []
        self._starts: list[float] = [0.0]

    def _add_piece(self) -> None:
        begun = self._steps[-1]
        context = self._context + begun
        first, growth, end = self._costs.piece(self._size, context)
        count = self.steps - begun
        if context + count > end:
            count = max(min(count, math.ceil(end - context)), 1)
        first, growth = first * self._pace, growth * self._pace
        self._firsts.append(first)
        self._growths.append(growth)
        self._steps.append(begun + count)
        self._starts.append(self._starts[-1] + _series(first, growth, count))

    def seconds(self, steps: int) -> float:
        """The seconds that the first `steps` steps take together."""
        while self._steps[-1] < steps:
            self._add_piece()
        index = bisect.bisect_left(self._steps, steps, 1) - 1
        if index >= len(self._firsts):
            return 0.0
        count = steps - self._steps[index]
        return self._starts[index] + _series(self._firsts[index], self._growths[index], count)

    def ended_by(self, seconds: float) -> int:
        """How many steps have ended `seconds` after the run began."""
        while self._starts[-1] <= seconds and self._steps[-1] < self.steps:
            self._add_piece()
        index = min(max(bisect.bisect_right(self._starts, seconds) - 1, 0), len(self._firsts) - 1)
        left = seconds - self._starts[index]
        first, growth = self._firsts[index], self._growths[index]
        if growth:
            half = first / growth - 0.5
            guess = math.sqrt(max(half * half + 2 * left / growth, 0.0))
            count = guess - half if growth > 0 else -half - guess
        else:
            count = left / first
        steps = min(max(self._steps[index] + int(count), 0), self.steps)
        while steps > 0 and self.seconds(steps) > seconds:
            steps -= 1
        while steps < self.steps and self.seconds(steps + 1) <= seconds:
            steps += 1
        return steps

    def gaps(self, first: int, last: int) -> Iterable[tuple[float, float, int]]:
        """Yields the steps from `first` to before `last` in linear pieces: the seconds of a piece's first and last step, and its number of
        steps."""
        while self._steps[-1] < last:
            self._add_piece()
        for index, seconds in enumerate(self._firsts):
            begin, end = max(first, self._steps[index]), min(last, self._steps[index + 1])
            if begin < end:
                growth, before = self._growths[index], self._steps[index]
                yield seconds + growth * (begin - before), seconds + growth * (end - 1 - before), end - begin


def _series(first: float, growth: float, count: int) -> float:
    return count * first + growth * (count * (count - 1) // 2)


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fits a line through the medians at each place (Theil–Sen). Returns its value at 0 and its slope, both at least 0."""
    by_place: dict[float, list[float]] = {}
    for place, value in points:
        by_place.setdefault(place, []).append(value)
    medians = sorted((place, statistics.median(values)) for place, values in by_place.items())
    slopes = [
        (there - here) / (far - near)
        for index, (near, here) in enumerate(medians)
        for far, there in medians[index + 1 :]
    ]
    slope = max(0.0, statistics.median(slopes)) if slopes else 0.0
    fixed = statistics.median(value - slope * place for place, value in medians) if medians else 0.0
    return max(0.0, fixed), slope


def read_costs(file: Path) -> CostModel:
    try:
        return msgspec.json.decode(file.read_bytes(), type=CostModel)
    except OSError as error:
        raise ConfigurationError(f"the costs in {file} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"{file} is no file that `tandem profile` writes: {error}") from error
