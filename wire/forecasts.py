"""What a change of the pools' sizes is expected to bring, and what came of it: kept by the controller, which foretells and grades it, and told to
the routers, which measure and show it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.wire.nodes import Role

# What is foretold: a time of a request, and which percentile of it among requests.
FIGURES: dict[str, tuple[str, float]] = {
    f"{name}, p{percent:.0f}": (field, percent)
    for name, field in (("first token", "first_token_s"), ("each further token", "token_s"))
    for percent in (50.0, 90.0)
}
SAID_FIRST = "first token, p90"
GRADED_REQUESTS = 60  # the most that a forecast is graded by, and how many its interval is made for
FEWEST_REQUESTS = 20  # the fewest, to foretell from and to grade by

Words = Annotated[str, Meta(max_length=200)]


class MeasuredRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that was answered whole, as its router measured it."""

    request_id: str
    ended_ago_s: float
    total_s: float
    first_token_s: float
    token_s: float


class ExpectedFigure(msgspec.Struct, frozen=True):
    """One figure, in seconds."""

    what: Words
    measured: float  # of the cluster as it is
    simulated: float  # the same
    then: float
    low: float
    high: float


class Forecast(msgspec.Struct, frozen=True):
    """What other sizes would do to the last requests."""

    now: Words
    then: Words
    requests: int
    seconds: float
    expected: Annotated[list[ExpectedFigure], Meta(max_length=len(FIGURES))]
    busy_now: dict[str, float]  # by role, simulated
    busy_then: dict[str, float]
    sizes: dict[Role, int] = {}  # `then`, of each role with an engine
    longest_s: float = 0.0  # the longest of these requests
    by_load: bool = False  # a step of the autoscaler, which no one ordered


class GradedFigure(msgspec.Struct, frozen=True):
    """One figure as it was foretold and as it came, in seconds."""

    what: str
    then: float
    low: float
    high: float
    came: float
    inside: bool


class GradedForecast(msgspec.Struct, frozen=True):
    unix_time: float
    now: str
    then: str
    requests: int  # that it was graded by
    figures: list[GradedFigure] = []
    not_graded: str = ""  # why
    by_load: bool = False


class FigureScore(msgspec.Struct, frozen=True):
    """Of the graded changes that were ordered, or of those that the load made."""

    what: str
    inside: int
    error: float  # the median of what was foretold, relative to what came
    graded: int = 0
    by_load: bool = False


class ForecastScore(msgspec.Struct, frozen=True):
    """What the last forecasts were worth."""

    graded: int = 0
    not_graded: int = 0
    figures: list[FigureScore] = []
    # In sentences: what is waited for or was not foretold, what came of the last one, and these figures.
    said: list[str] = []
