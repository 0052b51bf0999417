"""The same world as in `test_random_runs.py`, drawn by hypothesis: slower, and it shrinks what it finds.

TANDEM_STATEFUL_EXAMPLES sets how many lives are drawn. Slow, because they are many.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.engine.config import Reserve
from tandem.kvtransfer.config import LoadFailurePolicy
from tests.engine.scheduling.world import GROUPS, Source, World

EXAMPLES = int(os.environ.get("TANDEM_STATEFUL_EXAMPLES", "100"))
ANY = st.integers(0, 9)
PREFIX = tuple(range(100, 120))


class SchedulerMachine(RuleBasedStateMachine):
    world: World

    @initialize(
        groups=st.sampled_from(sorted(GROUPS)),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.booleans(),
        num_blocks=st.integers(8, 24),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(1, 40),
        threshold=st.sampled_from([0, 3]),
        reserve=st.sampled_from(list(Reserve)),
        ahead=st.booleans(),
        quick_peers=st.booleans(),
        on_failure=st.sampled_from(list(LoadFailurePolicy)),
    )
    def begin(
        self,
        groups: str,
        policy: str,
        caching: bool,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        threshold: int,
        reserve: Reserve,
        ahead: bool,
        quick_peers: bool,
        on_failure: LoadFailurePolicy,
    ) -> None:
        self.world = World(
            groups,
            ahead=ahead,
            quick_peers=quick_peers,
            policy=policy,
            caching=caching,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=threshold,
            reserve=reserve,
            on_failure=on_failure,
        )

    @rule(
        shared=st.integers(0, len(PREFIX)),
        own=st.lists(st.integers(0, 3), min_size=1, max_size=6),
        max_tokens=st.integers(1, 9),
        source=st.sampled_from(list(Source)),
        deferrals=st.integers(0, 2),
        num_moved=st.integers(0, 2),
        priority=st.integers(-1, 1),
    )
    def arrives(self, shared: int, own: list[int], max_tokens: int, source: Source, **fields: int) -> None:
        self.world.add([*PREFIX[:shared], *own], max_tokens, source, **fields)

    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @rule(which=ANY)
    def is_aborted(self, which: int) -> None:
        self.world.abort(which)

    @precondition(lambda self: self.world.connector.loads)
    @rule(which=ANY, good=st.booleans())
    def a_peer_writes(self, which: int, good: bool) -> None:
        self.world.peer_writes(which, good)

    @precondition(lambda self: self.world.connector.loads)
    @rule(which=ANY, num_valid=st.none() | st.integers(0, 20), spoil=st.booleans(), unsafe=st.booleans())
    def a_load_ends(self, which: int, num_valid: int | None, spoil: bool, unsafe: bool) -> None:
        self.world.conclude(which, num_valid, spoil=spoil, unsafe=unsafe)

    @rule()
    def a_peer_writes_to_blocks_in_quarantine(self) -> None:
        self.world.peer_writes_late()

    @rule(which=ANY)
    def a_block_leaves_quarantine(self, which: int) -> None:
        self.world.release(which)

    @rule()
    def the_next_load_goes_wrong(self) -> None:
        self.world.spoil_next = True

    @precondition(lambda self: self.world.connector.kept)
    @rule(which=ANY)
    def a_send_ends(self, which: int) -> None:
        self.world.send(which)

    @rule()
    def the_cache_is_reset(self) -> None:
        self.world.reset_prefix_cache()

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "world"):
            self.world.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()


TestSchedulerMachine = pytest.mark.slow(SchedulerMachine.TestCase)
TestSchedulerMachine.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
