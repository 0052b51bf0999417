"""SIGTERM to an actor's process, here a process that the test starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

PATIENCE_S = 60.0

# As Ray does it: the actor is made in the main thread, or, with asyncio, in another one, while the main thread runs what it is given.
PROCESS = """
import sys, threading, time
from tandem.cluster.on_ray.ending import PoliteEnd

def finish():
    print("finishing", flush=True)
    if sys.stdin.readline().strip() == "fail":
        raise ValueError("a mistake")
    print("finished", flush=True)

ends = []
make = lambda: ends.append(PoliteEnd(finish))
if sys.argv[1] == "main thread":
    make()
else:
    maker = threading.Thread(target=make)
    maker.start()
    maker.join()
print("made", flush=True)
while True:
    time.sleep(0.01)
"""


@contextmanager
def process(thread: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROCESS, thread]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert read(running) == "made"
            yield running
        finally:
            running.kill()


def read(running: subprocess.Popen[str]) -> str:
    assert running.stdout is not None
    return running.stdout.readline().strip()


def say(running: subprocess.Popen[str], what: str) -> None:
    assert running.stdin is not None
    running.stdin.write(what + "\n")
    running.stdin.flush()


@pytest.mark.parametrize("thread", ["main thread", "another thread"])
def test_what_is_under_way_is_finished_before_the_process_ends(thread: str) -> None:
    with process(thread) as running:
        os.kill(running.pid, signal.SIGTERM)
        assert read(running) == "finishing"
        assert running.poll() is None
        say(running, "go on")
        assert read(running) == "finished"
        assert running.wait(PATIENCE_S) == 143


@pytest.mark.parametrize("how", ["a second signal", "a mistake in finishing"])
def test_nothing_else_keeps_it(how: str) -> None:
    with process("main thread") as running:
        os.kill(running.pid, signal.SIGTERM)
        assert read(running) == "finishing"
        if how == "a second signal":
            os.kill(running.pid, signal.SIGTERM)
        else:
            say(running, "fail")
        assert running.wait(PATIENCE_S) == 143
