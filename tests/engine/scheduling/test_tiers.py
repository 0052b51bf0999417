"""The scheduler with a cache tier: the real connector, a model that knows the right content of every slot, and copies that are made as
late as possible."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tandem.base.errors import InvalidLogits
from tandem.engine.cache.group_manager import KVCacheGroup
from tandem.engine.config import Reserve
from tandem.engine.core import Engine
from tandem.kvtransfer.base import ConnectorContext, KVCacheMemory
from tandem.kvtransfer.config import EvictionPolicy, LoadFailurePolicy, TransferConfig
from tandem.kvtransfer.multi import MultiScheduler, MultiWorker
from tandem.kvtransfer.offload.manager import SlotManager, TierManager, filtered
from tandem.kvtransfer.offload.scheduler_half import TierScheduler
from tandem.kvtransfer.offload.spec import Copy, Mover, Tier
from tandem.kvtransfer.offload.worker_half import TierWorker
from tandem.wire.sampling import SamplingParams
from tests.engine.scheduling.driving import BLOCK, FULL, Driver, sliding
from tests.engine.scheduling.model import STATE, WRONG, alone
from tests.engine.scheduling.world import EOS, GROUPS_WITH_STATES, STATES, LazyDevice

RUNS = int(os.environ.get("TANDEM_RANDOM_RUNS", "24"))


class LateMover(Mover):
    """Copies the model's KV when the test says so. A store must only read KV that was computed before it was submitted."""

    stored_bytes = 0
    loaded_bytes = 0
    left_out = ""

    def __init__(self, driver: Driver, device: LazyDevice) -> None:
        self._kv = driver.model.kv
        self._device = device
        self._tier: dict[tuple[int, int], object] = {}
        self.queue: list[tuple[Copy, bool, object]] = []
        self._ended: dict[int, bool | None] = {}
        self.loads = 0
        self.loses = False  # what it loads is not right
        self.closed = False

    def submit(self, stores: Sequence[Copy], loads: Sequence[Copy]) -> None:
        if self.left_out:
            self._ended |= {job.job: None for job in (*stores, *loads)}
            return
        last = self._device.queue[-1] if self._device.queue else None
        self.queue += [(job, True, None) for job in loads]
        self.queue += [(job, False, last) for job in stores]

    def make(self, index: int) -> None:
        if not self.queue:
            return
        job, is_load, after = self.queue.pop(index % len(self.queue))
        if after is not None:
            self._device.run_until(after)
        self.loads += is_load
        for block, place in zip(job.blocks, job.places, strict=True):
            # A block is of tokens or of a state: what stands in it as the other is of an earlier life.
            for position in (*range(BLOCK), STATE):
                if is_load:
                    self._kv[block, position] = self._tier[place, position]
                else:
                    self._tier[place, position] = self._kv.get((block, position), WRONG)
        self._ended[job.job] = not (is_load and self.loses)

    def take_ended(self) -> dict[int, bool | None]:
        ended, self._ended = self._ended, {}
        return ended

    def stall(self) -> None:
        """The disk does not answer: everything is given up, and the tier is left out."""
        self.left_out = "it hangs"
        self._ended |= {job.job: None for job, *_ in self.queue}
        self.queue.clear()

    def answer_again(self) -> None:
        self.left_out = ""

    @property
    def busy(self) -> bool:
        return bool(self.queue or self._ended)

    def close(self) -> None:
        self.closed = True


class TierWorld:
    def __init__(
        self,
        *,
        num_slots: int = 50,
        policy: EvictionPolicy = EvictionPolicy.LRU,
        factor: int = 1,
        threshold: int = 0,
        ahead: bool = False,
        tiers: int = 1,
        **options: object,
    ) -> None:
        self.movers: list[LateMover] = []
        self.managers: list[SlotManager] = []
        self.tiers = [Tier(_Spec(self, num_slots, policy, threshold), factor) for _ in range(tiers)]
        context = ConnectorContext("n", 1, "127.0.0.1", BLOCK, TransferConfig(), lambda: None)
        groups = options.get("groups", (FULL,))
        planners = [TierScheduler(groups, tier) for tier in self.tiers]  # type: ignore[arg-type]
        workers = [TierWorker(context, tier) for tier in self.tiers]
        self.planner = planners[0]
        several = tiers > 1
        self.driver = Driver(
            connector=MultiScheduler(planners, longest=True) if several else planners[0],  # type: ignore[arg-type]
            eos=[EOS],
            **options,  # type: ignore[arg-type]
        )
        self.scheduler = self.driver.scheduler
        self.device = LazyDevice(self.driver)
        self.device.kv_cache = torch.zeros(self.device.info.num_blocks, 1, 2, 1, BLOCK, 1)
        worker = MultiWorker(workers) if several else workers[0]
        self.engine = Engine(self.scheduler, self.device, worker, ahead=ahead, clock=lambda: 0.0)
        self.requests: dict[str, Sequence[int]] = {}
        self.max_tokens: dict[str, int] = {}
        self.aborted: set[str] = set()

    def step(self) -> None:
        self.driver.record(self.engine.step().updates)
        for manager in self.managers:
            manager.check_integrity()

    def finish(self) -> None:
        for _ in range(5000):
            for mover in self.movers:
                mover.make(0)
            if not (
                self.scheduler.has_unfinished_requests()
                or self.scheduler.has_work()
                or any(mover.busy for mover in self.movers)
            ):
                break
            self.step()
        else:
            pytest.fail(f"no end: {list(self.scheduler.requests.values())}")
        stats = self.scheduler.stats()
        assert stats.free_blocks == stats.total_blocks
        assert not self.planner.jobs
        assert not self.planner.entries
        for request_id, prompt in self.requests.items():
            found, expected = self.driver.outputs[request_id], self.expected(request_id, prompt)
            assert found == (expected[: len(found)] if request_id in self.aborted else expected)

    def expected(self, request_id: str, prompt: Sequence[int]) -> list[int]:
        room = self.scheduler.max_model_len - len(prompt)
        return alone(prompt, min(self.max_tokens[request_id], room), [EOS])

    def run(self, prompt: Sequence[int], max_tokens: int = 2) -> list[int]:
        """Runs one request to its end and returns its answer."""
        request_id = self.ask(prompt, max_tokens)
        self.finish()
        return self.driver.outputs[request_id]

    def ask(self, prompt: Sequence[int], max_tokens: int = 2, **fields: object) -> str:
        request_id = f"r{len(self.requests)}"
        request = self.driver.add(request_id, prompt, max_tokens, **fields)  # type: ignore[arg-type]
        self.requests[request_id] = request.prompt_token_ids
        self.max_tokens[request_id] = max_tokens
        return request_id

    @property
    def loaded(self) -> int:
        return self.scheduler.stats().prompt_tokens_loaded

    @property
    def computed(self) -> int:
        return self.scheduler.stats().prompt_tokens_computed


class _Spec:
    name = "late"

    def __init__(self, world: TierWorld, num_slots: int, policy: EvictionPolicy, threshold: int) -> None:
        self._world = world
        self._num_slots = num_slots
        self._policy = policy
        self._threshold = threshold

    def open(self, memory: KVCacheMemory, wake: Callable[[], None]) -> tuple[TierManager, Mover]:
        manager = SlotManager(self._num_slots, self._policy)
        mover = LateMover(self._world.driver, self._world.device)
        self._world.managers.append(manager)
        self._world.movers.append(mover)
        return filtered(manager, self._threshold), mover


# Layers of one kind, of two, of three, and such as all have a window.
GROUPS = [(FULL,), (FULL, sliding(7)), (sliding(9), FULL, sliding(4)), (sliding(6),), (FULL, FULL)]
PROMPT = list(range(100, 100 + 6 * BLOCK + 1))


def push_out(world: TierWorld) -> None:
    """Empties the device's prefix cache."""
    world.scheduler.state.cache.reset_prefix_cache()


def forgotten(prompt: Sequence[int] = PROMPT, max_tokens: int = 2, **options: Any) -> tuple[TierWorld, list[int]]:
    """A world whose tier has a prompt that its device has forgotten, and the prompt's answer."""
    world = TierWorld(**options)
    answer = world.run(prompt, max_tokens)
    push_out(world)
    return world, answer


@pytest.mark.parametrize("ahead", [False, True])
def test_a_prompt_that_the_device_has_forgotten_is_loaded_and_not_computed(ahead: bool) -> None:
    world, first = forgotten(ahead=ahead)
    before = world.computed
    assert world.run(PROMPT) == first
    assert world.loaded == 6 * BLOCK
    assert world.computed - before == 1
    (first_chunk, *_) = world.driver.updates["r1"]
    assert first_chunk.cached_tokens == 6 * BLOCK, "usage counts what a tier had as cached"
    status = world.tiers[0].status()
    assert status.asked_tokens == 2 * 6 * BLOCK
    assert status.found_tokens == 6 * BLOCK


@pytest.mark.parametrize(
    ("prompt", "asked", "loaded"),
    [
        pytest.param(PROMPT[: 4 * BLOCK], {}, 3 * BLOCK, id="one token is always left to compute"),
        pytest.param(PROMPT, {"prompt_logprobs": 1}, 0, id="a prompt's log-probabilities are computed"),
    ],
)
def test_what_is_there_and_is_not_loaded(prompt: Sequence[int], asked: dict[str, int], loaded: int) -> None:
    world, _ = forgotten(prompt)
    world.ask(prompt, sampling=SamplingParams(max_tokens=2, **asked))
    world.finish()
    assert world.loaded == loaded


@pytest.mark.parametrize("start", range(7))
def test_larger_blocks_are_loaded_from_where_the_device_ends(start: int) -> None:
    """The tier's blocks are three of the device's, and what the device still has ends anywhere in one."""
    world = TierWorld(factor=3)
    world.run(PROMPT)
    table = world.scheduler.state.cache
    hits, _ = world.scheduler.find_prefix(world.driver.add("look", PROMPT))
    world.driver.abort("look")
    table.uncache(hits[0][start:])
    before = world.computed
    world.run(PROMPT)
    assert world.computed - before == 1
    assert world.loaded == (6 - start) * BLOCK if start < 6 else world.loaded == 0


def test_a_preemption_waits_for_no_copy_and_gives_no_block_away_that_is_being_copied() -> None:
    """Nothing is copied before the end, and the steps go on."""
    world = TierWorld(num_blocks=13, reserve=Reserve.NONE)
    world.ask([*range(200, 200 + 4 * BLOCK)], max_tokens=20)
    world.ask([*range(300, 300 + 4 * BLOCK)], max_tokens=20)
    cache = world.scheduler.state.cache
    for _ in range(40):
        world.step()
        if world.scheduler.stats().preemptions:
            break
    assert world.scheduler.stats().preemptions
    assert cache.reads
    assert all(cache.pool.ref_counts[block] for block in cache.reads)
    reading = {block for job, is_load, _ in world.movers[0].queue if not is_load for block in job.blocks}
    assert set(cache.reads) <= reading
    world.finish()
    assert world.movers[0].loads > 0, "it loads what it had computed"


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_load_that_is_given_up_is_computed_and_its_blocks_are_free(comes_back: bool) -> None:
    world, first = forgotten()
    asked = [world.ask(PROMPT), world.ask([*PROMPT, 7])]
    world.step()
    assert world.scheduler.stats().blocked == 1
    world.movers[0].stall()
    world.finish()
    assert world.driver.outputs[asked[0]] == first
    assert (world.loaded, world.scheduler.stats().loads_failed) == (0, 1)
    push_out(world)
    if comes_back:
        world.movers[0].answer_again()
    assert world.run(PROMPT) == first
    assert world.loaded == (6 * BLOCK if comes_back else 0), "what it has is not lost"


def test_wrong_kv_is_never_loaded_again() -> None:
    """Not what is being loaded when it is found out, either."""
    world, _ = forgotten()
    world.ask(PROMPT)
    world.step()
    world.scheduler.convict(None)
    world.finish()
    assert world.scheduler.stats().loads_failed == 1
    assert world.loaded == 0


def fail_in_next_step(world: TierWorld, request_id: str) -> None:
    step = world.scheduler.schedule()
    worker = world.engine.worker
    assert worker is not None
    assert step.connector_metadata is not None
    worker.bind_connector_metadata(step.connector_metadata)
    worker.start_load_kv()
    output = world.driver.model.execute(step)
    worker.wait_for_save()
    output.sampled_token_ids.clear()
    output.errors[request_id] = InvalidLogits("no number")
    world.driver.book(step, output, worker.get_finished(set()))
    world.aborted.add(request_id)


def test_a_request_whose_logits_are_no_numbers_leaves_nothing_in_the_tier() -> None:
    world = TierWorld()
    fail_in_next_step(world, world.ask(PROMPT, 5))
    world.finish()
    assert world.managers[0].used == 0


@pytest.mark.parametrize("groups", [(FULL,), (FULL, sliding(7))])
def test_what_an_adapter_explains_is_forgotten_and_nothing_else(groups: tuple[KVCacheGroup, ...]) -> None:
    world = TierWorld(groups=groups)
    answer = world.run(PROMPT, 3 * BLOCK)
    others = world.managers[0].used
    fail_in_next_step(world, world.ask(PROMPT, 5, lora="law"))
    world.finish()
    assert world.managers[0].used == others > 0
    push_out(world)
    world.run([*PROMPT, *answer, 5])
    assert world.loaded > 0


@pytest.mark.parametrize("policy", list(LoadFailurePolicy))
def test_what_a_tier_lost_is_computed_whatever_is_said_of_failed_transfers(policy: LoadFailurePolicy) -> None:
    world, first = forgotten(on_failure=policy)
    world.movers[0].loses = True
    assert world.run(PROMPT) == first
    assert (world.loaded, world.scheduler.stats().loads_failed) == (0, 1)
    world.movers[0].loses = False
    push_out(world)
    assert world.run(PROMPT) == first
    assert world.loaded == 6 * BLOCK, "it was stored again"


def test_of_two_tiers_the_one_that_has_more_loads() -> None:
    world, _ = forgotten(tiers=2)
    request = world.driver.add("look", PROMPT)
    world.managers[0].forget([request.block_hashes[2]])
    world.driver.abort("look")
    world.run(PROMPT)
    assert [mover.loads for mover in world.movers] == [0, 1]
    assert world.loaded == 6 * BLOCK
    push_out(world)
    world.run(PROMPT)
    assert [mover.loads for mover in world.movers] == [1, 1], "the nearer has it again"


@pytest.mark.parametrize("groups", GROUPS[1:])
def test_where_layers_have_windows_a_conversation_goes_on_from_its_last_turn(groups: Sequence[KVCacheGroup]) -> None:
    world, answer = forgotten(PROMPT, max_tokens=3 * BLOCK, groups=groups, num_blocks=200)
    world.run([*PROMPT, *answer, 5])
    kept = (len(PROMPT) + len(answer) - 1) // BLOCK * BLOCK
    assert world.loaded == kept
    # What another prompt shares ends before the window that was kept.
    push_out(world)
    computed = world.computed
    world.run([*PROMPT[: 4 * BLOCK], 7, 7])
    if any(group.window for group in groups):
        assert (world.loaded, world.computed - computed) == (kept, 4 * BLOCK + 2)
    else:
        assert world.loaded == kept + 4 * BLOCK


@pytest.mark.parametrize("groups", GROUPS_WITH_STATES.values(), ids=list(GROUPS_WITH_STATES))
@pytest.mark.parametrize("ahead", [False, True])
def test_states_are_loaded_with_the_prefix_that_they_come_after(groups: Sequence[KVCacheGroup], ahead: bool) -> None:
    """They are kept where a prompt's last block ends, so a conversation's next turn, and the same prompt, go on from there."""
    world = TierWorld(groups=groups, ahead=ahead)
    answer = world.run(PROMPT, max_tokens=3 * BLOCK)
    for prompt in (PROMPT, [*PROMPT, *answer, 5]):
        push_out(world)
        loaded, computed = world.loaded, world.computed
        world.run(prompt)
        assert world.loaded - loaded == 6 * BLOCK
        assert world.computed - computed == len(prompt) - 6 * BLOCK
    assert world.tiers[0].mover.loads == 2, "attention's blocks and states came together"  # type: ignore[attr-defined]


def test_a_state_that_was_given_up_shortens_the_hit_to_the_last_that_is_there() -> None:
    world = TierWorld(groups=(FULL, STATES))
    look = world.driver.add("look", PROMPT)
    world.driver.abort("look")
    world.run(PROMPT[: 3 * BLOCK + 1])
    world.run(PROMPT)
    manager, prefixes = world.managers[0], world.planner.prefixes
    found = [prefixes.end_of_prefix(manager, look, 0, 6)]
    for end in (6, 3):
        # One of the blocks of a state is enough.
        manager.forget(prefixes.state_keys(look, end)[1:])
        found.append(prefixes.end_of_prefix(manager, look, 0, 6))
    assert found == [6, 3, 0]


@pytest.mark.parametrize("groups", [(FULL,), (FULL, STATES)])
def test_of_requests_that_wait_for_one_load_all_but_the_first_find_it_on_the_device(
    groups: tuple[KVCacheGroup, ...],
) -> None:
    world, _ = forgotten(groups=groups)
    for tail in ([], [7], [7, 8]):
        world.ask([*PROMPT, *tail])
    world.finish()
    assert (world.loaded, world.movers[0].loads) == (6 * BLOCK, 1)


def test_a_checkpoint_that_is_being_copied_is_given_to_no_other_request() -> None:
    """Its request has ended, and the device needs every block."""
    world = TierWorld(groups=(FULL, STATES), num_blocks=15)
    world.run(PROMPT[:2], max_tokens=1)
    world.ask(PROMPT, max_tokens=2)
    while not world.movers[0].queue:
        world.step()
    for _ in range(4):
        world.step()
    assert world.scheduler.state.cache.reads
    world.ask([*range(300, 300 + 5 * BLOCK)])
    for _ in range(4):
        world.step()
    world.finish()
    push_out(world)
    world.run(PROMPT)
    assert world.loaded == 6 * BLOCK


def random_world(draw: random.Random, groups: Sequence[KVCacheGroup]) -> TierWorld:
    has_windows = any(not group.keeps_every_token for group in groups)
    return TierWorld(
        num_slots=draw.choice([2, 6, 20, 100]), policy=draw.choice(list(EvictionPolicy)),
        factor=1 if has_windows else draw.choice([1, 1, 2, 3]), threshold=draw.choice([0, 0, 2]),
        ahead=draw.random() < 0.5, tiers=draw.choice([1, 1, 2]), groups=groups,
        num_blocks=draw.choice([12, 16, 40]) * len(groups), max_num_seqs=draw.choice([1, 3, 8]),
        max_num_batched_tokens=draw.choice([4, 9, 30, 200])
    )  # fmt: skip


def run(number: int, *, states: bool = False) -> int:
    """Conversations: each turn's prompt is what was said before and some more."""
    draw = random.Random(number)
    world = random_world(draw, draw.choice(list(GROUPS_WITH_STATES.values()) if states else GROUPS))
    talks = [[draw.randrange(50) for _ in range(draw.randrange(1, 24))] for _ in range(3)]
    for _ in range(draw.choice([10, 60])):
        for _ in range(draw.choice([0, 0, 1, 2])):
            talk = draw.choice(talks)
            if len(talk) > 34:
                talk[:] = talk[: draw.randrange(1, 20)]
            talk += [draw.randrange(50) for _ in range(draw.randrange(1, 6))]
            world.ask(list(talk), draw.randrange(1, 8), cache_salt=draw.choice([None, None, "s"]))
            talk += alone(talk, 3, [])
        match draw.randrange(12):
            case 0:
                live = sorted(world.scheduler.requests)
                if live:
                    request_id = draw.choice(live)
                    world.driver.abort(request_id)
                    world.aborted.add(request_id)
            case 1:
                world.scheduler.state.cache.reset_prefix_cache()
            case 2:
                world.scheduler.convict(None) if number % 3 == 0 else None
            case 3 | 4 | 5 | 6 | 7:
                for _ in range(draw.randrange(4)):
                    draw.choice(world.movers).make(draw.randrange(100))
            case 8:
                draw.choice(world.movers).stall()
            case 9 | 10:
                draw.choice(world.movers).answer_again()
        world.step()
    world.finish()
    return world.loaded


@pytest.mark.parametrize("states", [False, True])
def test_random_conversations_read_only_their_own_kv(states: bool) -> None:
    loaded = sum(run(number, states=states) for number in range(20))
    assert loaded > 50


@pytest.mark.slow
@pytest.mark.more
@pytest.mark.parametrize("states", [False, True])
def test_many_random_conversations(states: bool) -> None:
    for number in range(20, 40 + RUNS):
        try:
            run(number, states=states)
        except BaseException as error:
            error.add_note(f"random conversation {number}")
            raise


def test_of_states_a_tier_tells_nothing_as_the_device_does() -> None:
    world = TierWorld(groups=(FULL, STATES))
    world.planner.note_events()
    world.run(PROMPT)
    events = list(world.planner.take_events())
    assert {(event.group_idx, event.medium) for event in events} == {(0, "LATE")}  # type: ignore[union-attr]
    assert sum(len(event.block_hashes) for event in events) == 6  # type: ignore[union-attr]
    assert world.managers[0].used == 6 + STATES.blocks_per_request


def test_a_tiers_events_name_blocks_and_their_group() -> None:
    world = TierWorld(groups=(FULL, sliding(8)))
    world.planner.note_events()
    hashes = [bytes([i]) * 32 for i in range(2)]
    manager = world.managers[0]
    room = manager.prepare_store([hashes[0], hashes[0] + b"\x01", hashes[1]])
    assert room is not None
    assert list(world.planner.take_events()) == [], "they are not written yet"
    manager.complete_store(room, written=True)
    manager.forget([hashes[1]])
    stored = {(event.group_idx, *event.block_hashes) for event in world.planner.take_events()}  # type: ignore[union-attr]
    assert {each[0] for each in stored} == {0, 1}
    assert (1, hashes[0]) in stored
