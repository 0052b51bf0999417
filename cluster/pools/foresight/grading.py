"""Compares what was foretold with what came. Knows no controller: the benchmark `foresight` grades simulated clusters with it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from tandem.base.percentile import percentile
from tandem.cluster.describe import counted, format_seconds
from tandem.wire.forecasts import (
    FEWEST_REQUESTS,
    FIGURES,
    GRADED_REQUESTS,
    SAID_FIRST,
    ExpectedFigure,
    FigureScore,
    Forecast,
    ForecastScore,
    GradedFigure,
    GradedForecast,
    MeasuredRequest,
)


def grade(forecast: Forecast, came: Sequence[MeasuredRequest], unix_time: float = 0.0) -> GradedForecast:
    """`came`: the requests that were answered after the change, in the order in which they ended. The first count."""
    first = came[:GRADED_REQUESTS]
    if len(first) < FEWEST_REQUESTS:
        return not_graded(
            forecast, f"too few requests came: {len(first)}, and {FEWEST_REQUESTS} are the fewest", unix_time
        )
    figures = [_graded(figure, first) for figure in forecast.expected if figure.what in FIGURES]
    return GradedForecast(unix_time, forecast.now, forecast.then, len(first), figures, by_load=forecast.by_load)


def not_graded(forecast: Forecast, why: str, unix_time: float = 0.0) -> GradedForecast:
    return GradedForecast(unix_time, forecast.now, forecast.then, 0, not_graded=why, by_load=forecast.by_load)


def _graded(figure: ExpectedFigure, requests: Sequence[MeasuredRequest]) -> GradedFigure:
    field, percent = FIGURES[figure.what]
    came = percentile(sorted(getattr(request, field) for request in requests), percent)
    is_inside = figure.low <= came <= figure.high
    return GradedFigure(figure.what, figure.then, figure.low, figure.high, came, is_inside)


def score_of(forecasts: Sequence[GradedForecast], waits: str = "") -> ForecastScore:
    """`waits`: the sentence about the last change, which is not graded yet."""
    graded = [one for one in forecasts if not one.not_graded]
    figures = []
    for by_load in (False, True):
        of_kind = [one for one in graded if one.by_load is by_load]
        figures += [_scored(what, of_kind, by_load) for what in FIGURES if any(_of(what, of_kind))]
    said = [waits, *(said_of(one) for one in forecasts[-1:]), *map(_said_score, figures)]
    return ForecastScore(len(graded), len(forecasts) - len(graded), figures, [line for line in said if line])


def _of(what: str, graded: Sequence[GradedForecast]) -> list[GradedFigure]:
    return [figure for one in graded for figure in one.figures if figure.what == what]


def _scored(what: str, graded: Sequence[GradedForecast], by_load: bool) -> FigureScore:
    figures = _of(what, graded)
    errors = [abs(figure.then / figure.came - 1) for figure in figures if figure.came > 0]
    inside, error = sum(figure.inside for figure in figures), median(errors) if errors else 0.0
    return FigureScore(what, inside, error, len(graded), by_load)


def said_of(one: GradedForecast) -> str:
    change = f"{one.now} → {one.then}"
    if one.not_graded:
        return f"{change}: its forecast was not graded: {one.not_graded}"
    figure = next((figure for figure in one.figures if figure.what == SAID_FIRST), None)
    if figure is None:
        return f"{change}: graded by {counted(one.requests, 'request')}"
    where = "inside" if figure.inside else "outside"
    low, high = format_seconds(figure.low), format_seconds(figure.high)
    return (
        f"{change}: {figure.what} was {format_seconds(figure.came)} in {counted(one.requests, 'request')}, {where} the forecast of "
        f"{format_seconds(figure.then)} ({low} to {high})"
    )


def _said_score(one: FigureScore) -> str:
    if one.what != SAID_FIRST:
        return ""
    of = "of a step by load" if one.by_load else "of an ordered change"
    return (
        f"of the last {counted(one.graded, 'graded forecast')} {of}, {one.what} came inside the interval {counted(one.inside, 'time')}; "
        f"median error {one.error:.0%}"
    )
