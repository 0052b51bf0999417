"""The encoder cache keeps what it has promised to a request until the request's tokens are computed, within its room and budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.engine.request import Request
from tandem.engine.scheduling.encoding.budget import EncoderCache
from tandem.wire.embeds import PromptEmbeds
from tandem.wire.images import MediaFeature
from tests.engine.made_requests import made_request

CAPACITY, PER_STEP = 12, 6
ROWS = PromptEmbeds("float32", 1, b"1234")
LENGTHS = {name: 1 + index % 4 * 2 for index, name in enumerate("abcdefgh")}  # 1, 3, 5, 7: the last more than a step's


def made(request_id: str, names: str, gap: int = 2) -> Request:
    media, at = [], gap
    for name in names:
        media.append(MediaFeature(name, at, LENGTHS[name]))
        at += LENGTHS[name] + gap
    return made_request(request_id, [0] * at, media=media, images=[b"file"])


@dataclasses.dataclass
class FakeRunner:
    """What a runner would have."""

    kept: dict[str, int] = dataclasses.field(default_factory=dict)

    def step(self, cache: EncoderCache) -> int:
        begun, forgotten = cache.take_step()
        for identifier in forgotten:
            del self.kept[identifier]
        for one in begun:
            assert one.identifier not in self.kept, "encoded again"
            self.kept[one.identifier] = one.length
        return sum(one.length for one in begun if one.rows is None)


class EncoderCacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache = EncoderCache(CAPACITY, PER_STEP)
        self.runner = FakeRunner()
        self.requests: dict[str, Request] = {}
        self.count = 0
        self.asked: dict[str, int] = {}  # of encoder nodes, and not answered

    @rule(names=st.text("abcdefgh", min_size=1, max_size=5))
    def begin(self, names: str) -> None:
        self.count += 1
        request = made(f"r{self.count}", names)
        self.requests[request.request_id] = request

    @rule(names=st.text("abcdefgh", min_size=1, max_size=5))
    def begin_with_an_encoder_node(self, names: str) -> None:
        self.begin(names)
        request = self.requests[f"r{self.count}"]
        wanted = self.cache.expect(request.request_id, request.media)
        self.asked |= {part.identifier: part.length for part in wanted}

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), come=st.booleans())
    def hear(self, data: st.DataObject, come: bool) -> None:
        """Some rows come, or do not. Those that no request waits for any more are nothing to the cache."""
        name = data.draw(st.sampled_from(sorted(self.asked)))
        del self.asked[name]
        if come:
            self.cache.came(name, ROWS)
        else:
            self.cache.will_not_come(name)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Some requests get some tokens; some of these lose them within the step, as the preempted do."""
        self.cache.begin_step(PER_STEP)
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.requests)), unique=True, min_size=1))
        planned: dict[str, int] = {}
        for request_id in chosen:
            request = self.requests[request_id]
            left = request.num_tokens - request.num_computed_tokens
            wanted = data.draw(st.integers(1, left))
            count = self.cache.cap(request, request.num_computed_tokens, wanted)
            assert 0 <= count <= wanted
            if count:
                self.cache.take(request, request.num_computed_tokens, count)
                planned[request_id] = count
            if planned and data.draw(st.integers(0, 3)) == 0:
                victim = data.draw(st.sampled_from(sorted(planned)))
                del planned[victim]
                self.requests[victim].num_computed_tokens = 0
                self.cache.release(victim)
        encoded = self.runner.step(self.cache)
        assert encoded <= PER_STEP or encoded in LENGTHS.values()
        for request_id, count in planned.items():
            request = self.requests[request_id]
            begin = request.num_computed_tokens
            for feature in request.media:
                if feature.offset < begin + count and feature.offset + feature.length > begin:
                    assert feature.identifier not in self.asked or feature.identifier in self.runner.kept
                    assert self.runner.kept[feature.identifier] == feature.length
            request.num_computed_tokens += count
            self.cache.passed(request)
            if request.num_computed_tokens == request.num_tokens:
                self.cache.release(request_id)
                self.cache.forget(request_id)
                del self.requests[request_id]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        self.cache.release(request_id)
        self.cache.forget(request_id)
        del self.requests[request_id]

    @invariant()
    def holds_together(self) -> None:
        self.cache.check_integrity(self.requests)
        assert sum(self.runner.kept.values()) <= CAPACITY
        assert len(self.cache) == len(self.runner.kept)

    def teardown(self) -> None:
        """All that is left comes to its end when each goes on as far as it can, and no rows come any more."""
        for name in self.asked:
            self.cache.will_not_come(name)
        for _ in range(200):
            if not self.requests:
                break
            self.cache.begin_step(PER_STEP)
            for request in list(self.requests.values()):
                begin = request.num_computed_tokens
                count = self.cache.cap(request, begin, request.num_tokens - begin)
                self.cache.take(request, begin, count)
                request.num_computed_tokens += count
                self.cache.passed(request)
                if request.num_computed_tokens == request.num_tokens:
                    self.cache.forget(request.request_id)
                    del self.requests[request.request_id]
            self.runner.step(self.cache)
        assert not self.requests


TestEncoderCacheRules = EncoderCacheMachine.TestCase
TestEncoderCacheRules.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_what_is_larger_than_a_step_has_one_of_its_own() -> None:
    cache = EncoderCache(CAPACITY, PER_STEP)
    cache.begin_step(PER_STEP)
    small, large = made("small", "a"), made("large", "d")
    cache.take(small, 0, cache.cap(small, 0, small.num_tokens))
    assert cache.cap(large, 0, large.num_tokens) == large.media[0].offset
    cache.take_step()
    cache.begin_step(PER_STEP)
    assert cache.cap(large, 0, large.num_tokens) == large.num_tokens


def test_the_longest_unused_makes_room() -> None:
    cache = EncoderCache(CAPACITY, 100)
    for names in ("c", "b", "c", "d"):  # 5, 3, 5 again, 7
        request = made(names, names)
        cache.begin_step(PER_STEP)
        cache.take(request, 0, request.num_tokens)
        cache.release(names)
        begun, forgotten = cache.take_step()
    assert [one.identifier for one in begun] == ["d"]
    assert forgotten == ["b"]


@pytest.mark.parametrize("computed", [0, 3, 4, 5])
def test_a_request_holds_what_its_next_tokens_need(computed: int) -> None:
    cache = EncoderCache(CAPACITY, 100)
    request = made("r", "b")  # its tokens 2 to 4
    cache.take(request, 0, 3)
    request.num_computed_tokens = computed
    cache.passed(request)
    cache.check_integrity({"r": request})
    other = made("other", "dc")  # both need the room of all
    assert (cache.cap(other, 0, other.num_tokens) == other.num_tokens) == (computed in (0, 5))


def test_rows_that_are_on_their_way_are_waited_for_and_cost_the_step_nothing() -> None:
    cache = EncoderCache(CAPACITY, PER_STEP)
    first, second = made("first", "cb"), made("second", "c")  # 5 and 3; 5
    assert cache.expect("first", first.media) == list(first.media)
    assert cache.expect("second", second.media) == []  # they are asked for once
    cache.begin_step(PER_STEP)
    assert cache.cap(first, 0, first.num_tokens) == first.media[0].offset
    assert cache.awaits(first, first.media[0].offset)
    cache.came("c", ROWS)
    cache.will_not_come("b")
    assert cache.cap(first, 0, first.num_tokens) == first.num_tokens
    cache.take(first, 0, first.num_tokens)
    begun, _ = cache.take_step()
    assert {one.identifier: one.rows for one in begun} == {"c": ROWS, "b": None}
    assert (cache.received_tokens, cache.encoded_tokens) == (5, 3)
    assert not cache.awaits(second, second.media[0].offset)


def test_so_many_rows_may_be_on_their_way_as_the_cache_has_room_for() -> None:
    cache = EncoderCache(CAPACITY, PER_STEP)
    many = made("many", "dcba")  # 7, 5, 3, 1
    assert [part.identifier for part in cache.expect("many", many.media)] == ["d", "c"]
    cache.forget("many")
    assert [part.identifier for part in cache.expect("other", made("other", "b").media)] == ["b"]


def test_an_image_is_reused_under_its_salt_alone() -> None:
    cache, runner = EncoderCache(CAPACITY, PER_STEP), FakeRunner()
    encoded = []
    for number, salt in enumerate(["x", "y", "x", None]):
        request = made_request(
            str(number), [0] * 9, media=[MediaFeature("a/0", 2, 3)], images=[b"file"], cache_salt=salt
        )
        cache.begin_step(PER_STEP)
        cache.take(request, 0, 9)
        encoded.append(runner.step(cache))
        cache.release(request.request_id)
    assert encoded == [3, 3, 0, 3]
    assert not any("x" in name or "y" in name for name in runner.kept), "no name has the salt itself"


@pytest.mark.parametrize("drop", [lambda cache: cache.drop(["b"]), EncoderCache.drop_all])
def test_a_part_that_is_dropped_is_made_again_once_no_request_holds_it(drop: Callable[[EncoderCache], None]) -> None:
    cache, runner = EncoderCache(CAPACITY, PER_STEP), FakeRunner()
    first, second = made("first", "b"), made("second", "b")
    for request in (first, second):
        cache.take(request, 0, 3)
        request.num_computed_tokens = 3  # in the middle of the part
    runner.step(cache)
    cache.release("first")
    drop(cache)
    cache.check_integrity({"second": second})
    cache.release("second")
    cache.check_integrity({})
    third = made("third", "b")
    cache.begin_step(PER_STEP)
    cache.take(third, 0, 7)
    assert runner.step(cache) == LENGTHS["b"]


def test_rows_that_are_in_doubt_are_not_taken_by_a_request_that_begins_now() -> None:
    cache, reads, begins = EncoderCache(CAPACITY, PER_STEP), made("reads", "c"), made("begins", "c")
    cache.begin_step(PER_STEP)
    cache.take(reads, 0, 4)  # its step ends in the middle of the part
    cache.take_step()
    reads.num_computed_tokens = 4
    cache.passed(reads)
    cache.drop_all()
    cache.begin_step(PER_STEP)
    assert cache.cap(begins, 0, 9) == 2, "up to the part"
    assert cache.cap(reads, 4, 5) == 5, "it goes on with what it has"
    cache.release("reads")
    assert cache.cap(begins, 0, 9) == 9
    cache.take(begins, 0, 9)
    begun, forgotten = cache.take_step()
    assert ([one.identifier for one in begun], forgotten) == (["c"], ["c"])
