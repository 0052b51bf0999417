"""The free queue behaves like a plain list."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tandem.base.errors import InternalError
from tandem.engine.cache.pool import FreeBlockQueue


def test_nothing_is_popped_when_there_is_too_little():
    queue = FreeBlockQueue(3)
    with pytest.raises(InternalError):
        queue.pop_front(4)
    assert queue.num_free == 3
    queue.check_integrity()


def test_only_what_is_in_the_queue_can_be_removed():
    queue = FreeBlockQueue(3)
    (block,) = queue.pop_front(1)
    assert block not in queue
    with pytest.raises(InternalError):
        queue.remove(block)


class QueueMachine(RuleBasedStateMachine):
    @initialize(size=st.integers(1, 12))
    def begin(self, size: int) -> None:
        self.queue = FreeBlockQueue(size)
        self.model = list(range(size))
        self.out: list[int] = []

    @rule(data=st.data())
    def pop(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.model)))
        popped = self.queue.pop_front(count)
        assert popped == self.model[:count]
        del self.model[:count]
        self.out += popped

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        back = data.draw(st.lists(st.sampled_from(self.out), unique=True))
        self.queue.append(back)
        self.model += back
        self.out = [block for block in self.out if block not in back]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.model))
        self.queue.remove(block)
        self.model.remove(block)
        self.out.append(block)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "queue"):
            self.queue.check_integrity()
            assert list(self.queue) == self.model
            assert self.queue.num_free == len(self.model)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
