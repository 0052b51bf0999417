"""A request: its identity, its tokens, its place in the queue, and its end."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tandem.engine.request import Request, RequestStatus
from tandem.wire.images import MediaFeature
from tandem.wire.sampling import SamplingParams
from tests.engine.made_requests import made_request


def request(
    name: str = "a", prompt: Sequence[int] = (1, 2, 3), sampling: SamplingParams | None = None, **fields: object
) -> Request:
    return made_request(name, prompt, sampling or SamplingParams(max_tokens=5), **fields)


def test_everything_after_preempted_is_an_end_and_has_a_reason():
    for status in RequestStatus:
        each = request()
        each.status = status
        ended = status.name.startswith("FINISHED")
        assert status.is_finished == each.is_finished == ended
        assert (each.finish_reason is not None) == ended
        assert status.is_blocked == status.name.startswith("WAITING_FOR")


def test_priority_then_arrival_then_id_then_identity():
    ordered = [
        request("z", priority=-1, arrival_time=9.0),
        request("y", priority=0, arrival_time=1.0),
        request("a", priority=0, arrival_time=2.0),
        request("b", priority=0, arrival_time=2.0),
        request("a", priority=3, arrival_time=0.0),
    ]
    shuffled = random.Random(0).sample(ordered, len(ordered))
    assert sorted(shuffled) == ordered
    one, other = request("a", arrival_time=1.0), request("a", arrival_time=1.0)
    assert (one < other) != (other < one)


def test_log_probabilities_of_the_prompt_rule_out_the_prefix_cache():
    assert request(sampling=SamplingParams(prompt_logprobs=0)).skip_reading_prefix_cache
    assert request(skip_reading_prefix_cache=True).skip_reading_prefix_cache
    assert not request().skip_reading_prefix_cache


def test_limits_are_fixed_when_a_scheduler_accepts_it():
    each = request(sampling=SamplingParams(max_tokens=5, stop_token_ids=[9]), eos_token_ids=frozenset({1}))
    each.limit(7, frozenset({2}))
    assert (each.length_limit, each.stop_token_ids) == (7, {1, 2, 9})
    each.limit(100, frozenset())
    assert each.length_limit == 8
    deaf = request(sampling=SamplingParams(ignore_eos=True, stop_token_ids=[9]), eos_token_ids=frozenset({1}))
    deaf.limit(100, frozenset({2}))
    assert deaf.stop_token_ids == {9}


def test_it_shows_where_it_stands():
    each = request(media=[MediaFeature("hash", 0, 2)])
    each.num_computed_tokens = 2
    assert repr(each) == "<Request a WAITING 2/3 tokens computed>"
