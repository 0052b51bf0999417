"""A node learns what its steps take, on a machine of which only this test knows the speed."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from tandem.decode_node.node import DecodeRules
from tandem.engine.config import SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.model.runner import ModelRunner
from tandem.engine.request import Request
from tandem.engine.scheduling.output import ModelOutput, SchedulerOutput
from tandem.node.config import NodeConfig
from tandem.node.step_costs.kept import file_of, read
from tandem.node.step_costs.learner import StepLearner
from tandem.node.step_costs.part import StepCostsPart, make
from tandem.node.wings import PartContext
from tandem.wire.nodes import Role
from tandem.wire.requests import NodeCounters, Submit
from tandem.wire.sampling import SamplingParams
from tandem.wire.step_costs import StepCosts
from tests.engine.engine_fakes import FakeRunner, make_scheduler
from tests.node.test_service import Node as ServingNode

PROMPTS = [(tokens, before) for tokens in (48, 200, 500, 900) for before in (0, 400)]
BATCHES = [(rows, context) for rows in (1, 3, 8, 14) for context in (100, 600)]


def prompt_s(tokens: float, pairs: float) -> float:
    return 0.02 + 0.0016 * tokens + 0.0002 * max(tokens - 300, 0) + 1.2e-6 * pairs


def rows_s(rows: float, context: float) -> float:
    return 0.014 + 0.002 * rows - 0.0006 * max(rows - 7, 0) + 6e-6 * context


@dataclasses.dataclass
class Device:
    """Computes one step after another, and takes a time for it that varies. One step in fifty stands still for a while."""

    speed: float = 1.0
    now: float = 0.0
    free_at: float = 0.0
    rng: random.Random = dataclasses.field(default_factory=lambda: random.Random(7))

    def begin(self, seconds: float) -> float:
        seconds *= self.rng.gauss(1.0, 0.05) * (4.0 if self.rng.random() < 0.02 else 1.0) / self.speed
        self.free_at = max(self.now, self.free_at) + seconds
        return self.free_at


@dataclasses.dataclass
class Computing:
    output: ModelOutput
    device: Device
    ends: float

    def finish(self) -> ModelOutput:
        self.device.now = max(self.device.now, self.ends)
        return self.output


class TimedRunner(FakeRunner):
    def __init__(self, device: Device) -> None:
        super().__init__(num_blocks=30_000, max_model_len=100_000)
        self.info = msgspec.structs.replace(self.info, content="sha256:a")
        self._device = device

    def start(self, step: SchedulerOutput, hooks: object = None) -> Computing:  # type: ignore[override]
        before = dict(zip(step.cached_reqs.req_ids, step.cached_reqs.num_computed_tokens, strict=True))
        before |= {new.req_id: new.num_computed_tokens for new in step.new_reqs}
        tokens = pairs = rows = context = 0
        for request_id, count in step.num_scheduled_tokens.items():
            at = before[request_id]
            if count == 1 and at:
                rows, context = rows + 1, context + at + 1
            else:
                tokens, pairs = tokens + count, pairs + count * at + count * (count + 1) // 2
        seconds = prompt_s(tokens, pairs) if tokens else 0.0
        if rows:
            seconds += rows_s(rows, context) - (rows_s(0, 0) if tokens else 0.0)
        return Computing(self._execute(step), self._device, self._device.begin(seconds))


class Node:
    """A node's loop, without its thread: requests of many lengths, and pauses."""

    def __init__(self, *, ahead: bool, answers: bool = True, kept: StepCosts | None = None) -> None:
        self.device = Device()
        runner = TimedRunner(self.device)
        scheduler = make_scheduler(runner, config=SchedulerConfig(max_num_batched_tokens=1024, step_target_ms=1500))
        self.engine = Engine(scheduler, cast("ModelRunner", runner), None, ahead=ahead, clock=lambda: self.device.now)
        self.learner = StepLearner(kept)
        self.part = StepCostsPart(scheduler, self.learner)
        self._answers = answers
        self._rng = random.Random(3)
        self._asked = 0

    def serve(self, seconds: float) -> None:
        until = self.device.now + seconds
        while self.device.now < until:
            while len(self.engine.scheduler.requests) < self._rng.randrange(24):
                self._ask()
            for _ in range(self._rng.randrange(120)):
                self.part.before_step(self.device.now)
                if not self.engine.step().progressed:
                    self.device.now += self._rng.random()
                    break

    def _ask(self) -> None:
        self._asked += 1
        length = self._rng.choice([20, 60, 150, 400, 800, 1500])
        most = self._rng.randrange(1, 300) if self._answers else 1
        start = 1000 * self._asked % 1500
        submit = Submit(
            request_id=f"r{self._asked}",
            reply_to="r",
            prompt_token_ids=[10 + (start + self._asked * i) % 1500 for i in range(length)],
            sampling=SamplingParams(max_tokens=most, temperature=0, ignore_eos=True),
            timeout_s=60.0,
        )
        self.engine.add_request(Request(submit.request_id, submit, arrival_time=self.device.now))

    @property
    def costs(self) -> StepCosts:
        return self.learner.costs()


def errors_of_prompts(costs: StepCosts, speed: float) -> list[float]:
    found = []
    for tokens, before in PROMPTS:
        pairs = tokens * before + tokens * (tokens + 1) / 2
        found.append(abs(costs.prompt_s(tokens, pairs) * speed / prompt_s(tokens, pairs) - 1))
    return sorted(found)


def errors_of_rows(costs: StepCosts, speed: float) -> list[float]:
    of = [(rows, rows * context) for rows, context in BATCHES]
    return sorted(abs(costs.rows_s(*each) * speed / rows_s(*each) - 1) for each in of)


def middle(errors: list[float]) -> float:
    return errors[len(errors) // 2]


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_a_node_learns_its_steps_and_follows_a_machine_that_computes_at_half_its_speed(ahead: bool) -> None:
    node = Node(ahead=ahead)
    for speed, seconds in ((1.0, 120), (0.5, 60)):
        node.device.speed = speed
        node.serve(seconds)
        for errors in (errors_of_prompts(node.costs, speed), errors_of_rows(node.costs, speed)):
            assert middle(errors) < 0.1, errors
            assert errors[-1] < 0.2, errors
    assert node.costs.prompts_seen > 60
    assert node.costs.rows_seen > 60
    assert node.costs.most_prompt_tokens == 1024


def test_what_was_not_computed_since_the_machine_got_slower_is_known_to_be_slower() -> None:
    node = Node(ahead=False)
    node.serve(120)
    node.device.speed = 0.5
    now = 0.0
    for turn in range(40):
        rows = 1 + turn % 8
        node.learner.took(0, 0, rows, 300 * rows, rows_s(rows, 300 * rows) / 0.5)
        now += rows_s(rows, 300 * rows) / 0.5
    assert now < 60
    assert middle(errors_of_prompts(node.costs, 0.5)) < 0.1


def test_an_outlier_moves_nothing() -> None:
    node = Node(ahead=False)
    node.serve(60)
    before = node.costs
    node.learner.took(0, 0, 4, 400, 5.0)
    assert node.costs.rows_s(4, 400) == pytest.approx(before.rows_s(4, 400), rel=0.05)
    assert node.costs.prompt_s(200, 20_000) == pytest.approx(before.prompt_s(200, 20_000), rel=0.05)


def test_steps_for_which_a_clock_stands_still_teach_nothing() -> None:
    node = Node(ahead=False)
    node.device.speed = 1e12
    node.serve(0.2)
    assert (node.costs.prompts_seen, node.costs.rows_seen) == (0, 0)


def test_a_node_that_only_reads_prompts_knows_nothing_of_answers() -> None:
    node = Node(ahead=False, answers=False)
    node.serve(30)
    assert node.costs.rows_seen == 0
    assert middle(errors_of_prompts(node.costs, 1)) < 0.06


def test_a_started_node_has_the_costs_of_the_last_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    node = Node(ahead=False)
    context = PartContext(
        config=NodeConfig("n0", Role.AGGREGATED),
        engine=node.engine,
        in_step=lambda run: None,
        fail=lambda request_id, error: None,
    )
    node.serve(1)
    part = make(context)
    assert isinstance(part, StepCostsPart)
    node.part = part
    node.serve(60)
    part.stop()
    told: dict[str, Any] = {}
    part.count(told)
    learnt = NodeCounters(**told).step_costs
    assert learnt is not None
    assert read(file_of(context.config, node.engine.info)) == learnt

    again = make(context)
    assert isinstance(again, StepCostsPart)
    again.count(told)
    again.stop()
    for tokens, _ in PROMPTS:
        pairs = tokens * (tokens + 1) / 2
        assert told["step_costs"].prompt_s(tokens, pairs) == pytest.approx(learnt.prompt_s(tokens, pairs), rel=0.01)
    other = msgspec.structs.replace(node.engine.info, content="sha256:b")
    assert read(file_of(context.config, other)) is None


def test_a_broken_file_is_no_costs(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    assert read(file) is None
    for text in ("{", '{"coefficients": [1.0]}'):
        file.write_text(text)
        assert read(file) is None


def test_a_serving_node_tells_them_with_its_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.node.step_costs.part.TELL_S", 0.0)
    with ServingNode(DecodeRules(Role.DECODE)) as node:
        node.submit(prompt=40, sampling=SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
        node.outgoing.until_finished("r")
        costs = node.service.status().totals.step_costs
    assert costs is not None
    assert costs.prompts_seen
    assert costs.rows_seen
    assert costs.prompt_s(40, 820) > 0
