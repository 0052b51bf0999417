"""Whether the scheduler has work, or only an event can give it some: the loop must neither spin nor sleep through work."""

from __future__ import annotations

from tests.engine.scheduling.driving import Driver, FakeConnector, produce, sent


def test_there_is_work_until_the_runner_has_heard_of_every_end():
    driver = Driver()
    assert not driver.scheduler.has_work()
    driver.add("a", max_tokens=1)
    assert driver.scheduler.has_work()
    driver.step()
    assert not driver.scheduler.has_unfinished_requests()
    assert driver.scheduler.has_work()
    driver.step()
    assert not driver.scheduler.has_work()


def test_a_line_that_waits_for_held_blocks_is_no_work_until_they_are_free():
    connector = FakeConnector()
    connector.keeps.add("a")
    driver = Driver(connector=connector, num_blocks=4)
    driver.add("a", prompt=10, max_tokens=1, transfer=produce())
    driver.steps(2)
    driver.add("b", prompt=10, max_tokens=1)
    assert driver.scheduler.has_work()
    driver.step()
    assert not driver.scheduler.has_work()
    driver.step(sent("a"))
    assert driver.scheduler.has_work()
    assert driver.step()[0].num_scheduled_tokens == {"b": 10}
