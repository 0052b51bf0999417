"""Drafting stops where it does not pay, goes on where it does, and never costs more than its allowance."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.request import Request
from tandem.engine.scheduling.drafting.judge import DraftJudge
from tandem.engine.scheduling.output import CachedRequestData, ModelOutput, SchedulerOutput
from tandem.wire.sampling import SamplingParams
from tests.engine.made_requests import made_request
from tests.engine.scheduling.driving import BLOCK, Driver
from tests.engine.scheduling.model import alone, next_token

LOSS = 0.02


@dataclasses.dataclass
class Node:
    """A simulated node: a step's time is linear in its rows, and each request's drafts are right with a given probability."""

    chances: dict[str, float]
    fixed_s: float = 0.004
    token_s: float = 0.002
    search_s: float = 0.0
    guess_s: float = 0.0  # of a draft model, for each token
    most: int = 4
    loss: float = LOSS
    seed: int = 0
    seconds: float = 0.0  # all steps'
    alone_s: float = 0.0  # the same tokens' without drafts, as far as a row's share of its step says
    tokens: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.judge = DraftJudge(self.most, self.loss)
        self.requests = {name: self.request(name) for name in self.chances}
        self.drafts: dict[str, int] = {}
        self.drafted = dict.fromkeys(self.chances, 0)

    @staticmethod
    def request(name: str) -> Request:
        request = made_request(name, [1], SamplingParams(max_tokens=1 << 30))
        request.limit(1 << 30, frozenset())
        request.num_computed_tokens = request.num_tokens
        return request

    def step(self) -> None:
        rows = len(self.requests)
        drafts = {name: [0] * count for name, count in self.drafts.items()}
        scheduled = {name: 1 + len(drafts.get(name, ())) for name in self.requests}
        total = sum(scheduled.values())
        step = SchedulerOutput([], CachedRequestData(), scheduled, total, drafts, set(), set())
        limits = self.judge.limits(step, self.requests.values())
        taken = self.fixed_s + self.token_s * total
        self.judge.took(step, taken)
        row = (self.fixed_s + self.token_s * rows) / rows
        accepted = 0
        for name, count in self.drafts.items():
            right = 0
            while right < count and self.random.random() < self.chances[name]:
                right += 1
            self.judge.settled(self.requests[name], count, right)
            self.drafted[name] += count
            accepted += right
        looking = self.search_s * len(limits) + self.guess_s * sum(limits.values())
        self.judge.searched(limits, limits, self.requests, looking, self.guess_s)
        self.seconds += taken + looking
        self.alone_s += row * (rows + accepted)
        self.tokens += rows + accepted
        self.steps += 1
        self.drafts = dict(limits)

    def run(self, steps: int) -> Node:
        for _ in range(steps):
            self.step()
        return self

    @property
    def cost(self) -> float:
        """The time spent, as a share of the time that the same tokens take without drafts."""
        return self.seconds / self.alone_s


@settings(max_examples=25, deadline=None)
@given(
    chances=st.lists(st.sampled_from([0.0, 0.05, 0.3, 0.6, 0.95]), min_size=1, max_size=6),
    token_s=st.sampled_from([0.0, 0.0001, 0.001, 0.01]),
    search_s=st.sampled_from([0.0, 0.0001]),
    guess_s=st.sampled_from([0.0, 0.0005, 0.01]),
    most=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_drafts_never_cost_more_than_their_allowance(
    chances: list[float], token_s: float, search_s: float, guess_s: float, most: int, seed: int
) -> None:
    named = {str(place): chance for place, chance in enumerate(chances)}
    node = Node(named, token_s=token_s, search_s=search_s, guess_s=guess_s, most=most, seed=seed).run(2000)
    assert node.cost < 1 + LOSS + 60 / 2000  # what it begins with, and what savings it may spend again


def test_where_they_are_never_right_they_cost_the_allowance_and_become_few() -> None:
    node = Node({"a": 0.0, "b": 0.0}).run(300)
    before = node.drafted["a"] + node.drafted["b"]
    lengths: set[int] = set()
    for _ in range(3000):
        node.step()
        lengths |= {*node.drafts.values()}
    assert lengths == {1}, "only trials are left"
    assert node.cost < 1.03
    assert node.drafted["a"] + node.drafted["b"] - before < 0.03 * 2 * 3000


@pytest.mark.parametrize("token_s", [0.0, 0.0005])
def test_where_they_are_mostly_right_they_are_long(token_s: float) -> None:
    node = Node({"a": 0.95}, token_s=token_s).run(1000)
    assert node.tokens / node.steps > 3.5
    assert node.cost < 0.45


def test_a_draft_model_guesses_as_far_as_a_token_of_its_own_pays() -> None:
    quick = Node({"a": 0.8}, token_s=0.0, guess_s=0.0004).run(1000)
    slow = Node({"a": 0.8}, token_s=0.0, guess_s=0.0025).run(1000)
    assert quick.tokens / quick.steps > slow.tokens / slow.steps > 1.5
    assert quick.cost < slow.cost < 1
    never = Node({"a": 0.8}, token_s=0.0, guess_s=0.005).run(2000)
    assert never.cost < 1.03
    assert never.tokens / never.steps < 1.1


def test_a_step_that_no_clock_saw_says_nothing() -> None:
    node = Node({"a": 0.9}, token_s=0.0, guess_s=0.001).run(500)
    step = SchedulerOutput([], CachedRequestData(), {"a": 1}, 1, {}, set(), set())
    before = node.judge.limits(step, node.requests.values())
    for _ in range(500):
        node.judge.took(step, 0.0)
    assert before["a"] > 1
    assert node.judge.limits(step, node.requests.values()) == before


def test_where_a_token_costs_a_row_little_is_guessed() -> None:
    node = Node({"a": 0.9}, fixed_s=0.0, token_s=0.01).run(200)
    before = node.drafted["a"]
    node.run(2000)
    assert node.drafted["a"] - before < 600, "trials of one token, as far as the allowance goes"
    assert node.cost < 1.03


def test_a_request_that_repeats_itself_gets_drafts_beside_one_that_does_not() -> None:
    node = Node({"code": 0.9, "chat": 0.0}, token_s=0.0005).run(2000)
    assert node.drafted["code"] > 20 * node.drafted["chat"]
    assert node.cost < 0.7


def test_a_text_that_begins_to_repeat_itself_is_noticed() -> None:
    node = Node({"a": 0.0}, token_s=0.0005).run(2000)
    node.chances["a"] = 0.95
    node.run(400)
    before, tokens = node.steps, node.tokens
    node.run(200)
    assert (node.tokens - tokens) / (node.steps - before) > 3


def test_looking_for_drafts_that_are_never_found_becomes_seldom() -> None:
    judge = DraftJudge(4, LOSS)
    request = Node.request("a")
    step = SchedulerOutput([], CachedRequestData(), {"a": 1}, 1, {}, set(), set())
    asked = 0
    for _ in range(1000):
        limits = judge.limits(step, [request])
        asked += bool(limits)
        judge.took(step, 0.01)
        judge.searched(limits, (), {"a": request}, 0.0)
    assert asked < 130
    judge.searched({"a": 1, "gone": 1}, ("a",), {"a": request}, 0.0)
    request.drafting.wait = 0
    assert [bool(judge.limits(step, [request])) for _ in range(3)] == [True] * 3


@pytest.mark.parametrize("search_s", [0.0, 0.1])  # longer than a step
def test_a_loss_of_one_judges_nothing(search_s: float) -> None:
    node = Node({"a": 0.0}, loss=1.0, search_s=search_s).run(100)
    assert node.drafted["a"] == 99 * 4


def test_who_samples_nothing_or_ends_with_its_next_token_gets_none() -> None:
    judge = DraftJudge(4, LOSS)
    step = SchedulerOutput([], CachedRequestData(), {}, 0, {}, set(), set())
    behind, last, two = (Node.request(name) for name in ("behind", "last", "two"))
    behind.num_computed_tokens = 0
    last.length_limit = last.num_tokens + 1
    two.length_limit = two.num_tokens + 2
    assert judge.limits(step, [behind, last, two]) == {"two": 1}


def sample(driver: Driver, tokens: list[int], drafts: list[int] | None = None):
    step = driver.schedule()
    output = ModelOutput({"a": tokens}, draft_token_ids={"a": drafts} if drafts else {})
    return step, driver.book(step, output)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_rejected_drafts_are_taken_back(accepted):
    driver = Driver()
    request = driver.add("a", prompt=6, max_tokens=20)
    sample(driver, [5], drafts=[1, 2, 3])
    step = driver.schedule()
    assert request.num_computed_tokens == 6 + 1 + 3
    driver.book(step, ModelOutput({"a": [1, 2, 3, 9][: accepted + 1]}))
    assert request.num_computed_tokens == 6 + 1 + accepted
    assert request.num_tokens == request.num_computed_tokens + 1
    stats = driver.scheduler.stats()
    assert (stats.speculative_drafted, stats.speculative_accepted) == (3, accepted)
    assert stats.speculative_steps == 1
    assert stats.speculative_accepted_at == [int(position < accepted) for position in range(3)]


def test_drafts_beyond_the_budget_are_cut_off():
    driver = Driver(max_num_batched_tokens=8)
    driver.add("a", prompt=6, max_tokens=20)
    driver.add("b", prompt=2, max_tokens=20)
    step = driver.schedule()
    driver.book(step, ModelOutput({"a": [5], "b": [5]}, draft_token_ids={"a": [1] * 5, "b": [2] * 5}))
    step = driver.schedule()
    assert step.num_scheduled_tokens == {"a": 6, "b": 2}
    assert step.spec_token_ids == {"a": [1] * 5, "b": [2]}


def test_drafts_beyond_the_context_are_cut_off():
    driver = Driver(max_model_len=10)
    driver.add("a", prompt=6, max_tokens=20)
    sample(driver, [5], drafts=[1] * 9)
    step = driver.schedule()
    assert step.num_scheduled_tokens == {"a": 3}
    assert step.spec_token_ids == {"a": [1, 1]}


def test_a_block_with_drafts_in_it_is_not_found_by_others():
    driver = Driver()
    request = driver.add("a", prompt=6, max_tokens=20)
    sample(driver, [5], drafts=[1, 2])  # seven tokens are certain, nine are computed
    driver.schedule()
    with_drafts = [*request.prompt_token_ids, 5, 1, 2]
    driver.add("b", with_drafts, max_tokens=1)
    step = driver.schedule()
    assert step.new_reqs[0].num_computed_tokens == BLOCK


def test_accepted_drafts_are_found_once_they_are_certain():
    driver = Driver()
    request = driver.add("a", prompt=6, max_tokens=20)
    sample(driver, [5], drafts=[1, 2])
    sample(driver, [1, 2, 3])
    sample(driver, [4])
    driver.add("b", [*request.all_token_ids, 9], max_tokens=1)
    assert driver.schedule().new_reqs[0].num_computed_tokens == 2 * BLOCK


def test_room_is_kept_for_the_drafts_of_the_next_step():
    driver = Driver(num_speculative_tokens=3)
    driver.add("a", prompt=6, max_tokens=9)
    (new,) = driver.step()[0].new_reqs
    assert len(new.block_ids[0]) == 3  # six tokens and three drafts


@pytest.mark.parametrize("good", [0, 1, 2])
def test_speculation_changes_the_number_of_steps_and_not_the_answer(good):
    def propose(request_id: str, tokens: list[int]) -> list[int]:
        drafts: list[int] = []
        for _ in range(good):
            drafts.append(next_token(tokens + drafts))
        return [*drafts, -1]

    driver = Driver(num_speculative_tokens=3)
    driver.model.propose = propose
    request = driver.add("a", prompt=6, max_tokens=30)
    steps = driver.run()
    assert driver.outputs["a"] == alone(request.prompt_token_ids, 30)
    assert steps == 1 + -(-29 // (good + 1)) + 1  # and one to tell the runner
