"""What came is compared with what was foretold, request by request."""

from __future__ import annotations

import msgspec
import pytest

from tandem.cluster.pools.foresight.grading import grade, not_graded, said_of, score_of
from tandem.wire.forecasts import ExpectedFigure, Forecast, MeasuredRequest
from tandem.wire.nodes import Role


def forecast(then: float = 1.0, low: float = 0.8, high: float = 1.3, **fields: object) -> Forecast:
    figures = [
        ExpectedFigure("first token, p90", 2.0, 2.0, then, low, high),
        ExpectedFigure("each further token, p50", 0.03, 0.03, 0.03, 0.02, 0.04),
    ]
    given = {"sizes": {Role.PREFILL: 2, Role.DECODE: 1}, "longest_s": 3.0, **fields}
    return Forecast("1 prefill, 1 decode", "2 prefill, 1 decode", 60, 90.0, figures, {}, {}, **given)  # type: ignore[arg-type]


def took(first_token_s: float, count: int, token_s: float = 0.03) -> list[MeasuredRequest]:
    return [MeasuredRequest(f"r{index}", 0.0, 2.0, first_token_s, token_s) for index in range(count)]


@pytest.mark.parametrize(("came", "inside"), [(0.7, False), (0.8, True), (1.3, True), (1.4, False)])
def test_a_figure_lies_in_its_interval_or_does_not(came: float, inside: bool) -> None:
    first, further = grade(forecast(), took(came, 30)).figures
    assert (first.came, first.inside, further.inside) == (came, inside, True)


def test_the_first_sixty_count_by_their_percentile() -> None:
    graded = grade(forecast(), [*took(1.0, 60), *took(9.0, 40)])
    assert (graded.requests, graded.figures[0].came) == (60, 1.0)
    assert grade(forecast(), [*took(0.1, 25), *took(1.2, 5)]).figures[0].came == 1.2
    few = grade(forecast(), took(1.0, 19))
    assert (few.figures, few.not_graded) == ([], "too few requests came: 19, and 20 are the fewest")


def test_a_figure_that_this_version_does_not_know_is_passed_over() -> None:
    known = forecast().expected[0]
    told = Forecast("a", "b", 60, 90.0, [msgspec.structs.replace(known, what="carbon, p90"), known], {}, {})
    assert [figure.what for figure in grade(told, took(1.0, 30)).figures] == ["first token, p90"]


def test_the_score_is_of_the_graded_and_its_error_is_the_median() -> None:
    graded = [grade(forecast(), took(came, 30)) for came in (1.0, 1.25, 2.0, 0.8)]
    score = score_of([*graded, not_graded(forecast(), "it was paused")])
    assert (score.graded, score.not_graded) == (4, 1)
    first, further = score.figures
    assert (first.what, first.inside) == ("first token, p90", 3)
    assert first.error == pytest.approx((0.2 + 0.25) / 2)
    assert (further.inside, further.error) == (4, 0.0)


def test_what_was_ordered_and_what_the_load_made_have_scores_of_their_own() -> None:
    ordered = [grade(forecast(), took(came, 30)) for came in (1.0, 2.0)]
    by_load = [grade(forecast(by_load=True), took(1.0, 30))]
    score = score_of([*ordered, *by_load, not_graded(forecast(by_load=True), "too few requests came")])
    p90 = [one for one in score.figures if one.what == "first token, p90"]
    assert [(one.by_load, one.graded, one.inside) for one in p90] == [(False, 2, 1), (True, 1, 1)]
    assert (score.graded, score.not_graded) == (3, 1)
    assert [line.partition(",")[0] for line in score.said[-2:]] == [
        "of the last 2 graded forecasts of an ordered change",
        "of the last 1 graded forecast of a step by load",
    ]


def test_the_score_is_said_in_sentences() -> None:
    one = grade(forecast(), took(1.05, 60))
    assert said_of(one) == (
        "1 prefill, 1 decode → 2 prefill, 1 decode: first token, p90 was 1.1 s in 60 requests, inside the forecast of 1.0 s "
        "(800 ms to 1.3 s)"
    )
    score = score_of([one], waits="the next one waits")
    assert score.said == [
        "the next one waits",
        said_of(one),
        "of the last 1 graded forecast of an ordered change, first token, p90 came inside the interval 1 time; median error 5%",
    ]
    assert not score_of([]).said
    assert "was not graded: it was paused" in said_of(not_graded(forecast(), "it was paused"))
