"""The library's threads sleep between steps, and all end with it."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest
import torch

from tandem.base.errors import InternalError
from tandem.engine.model.native.forward import cores_for
from tests.engine.native.batches import Sequences
from tests.engine.native.test_native_model import build, native, tokens, windows
from tests.idling import idle_share

linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@linux
@pytest.mark.slow
def test_idle_threads_sleep() -> None:
    """An engine that waits for requests must not use its cores."""
    model = build("llama")
    forward, sequences = native(model, threads=2)
    forward(sequences.batch({0: tokens(20)}))
    threading.Event().wait(0.05)  # a thread may look for work a moment longer
    assert idle_share(seconds=0.5) < 0.02
    forward.close()


@linux
def test_models_come_and_go_without_leaving_anything() -> None:
    model = build("llama")

    def once() -> None:
        forward, sequences = native(model, threads=2)
        forward(sequences.batch({0: tokens(20)}))

    for _ in range(3):
        once()
    gc.collect()
    threads, memory = num_threads(), resident_bytes()
    for _ in range(30):
        once()
    gc.collect()
    assert num_threads() == threads
    # A model maps some megabytes, so thirty that stayed would show.
    assert resident_bytes() - memory < 8 << 20


def test_close_ends_the_threads_at_once() -> None:
    forward, sequences = native(build("llama"), threads=2)
    before = num_threads()
    forward.close()
    forward.close()
    assert num_threads() == before - min(1, len(os.sched_getaffinity(0)) - 1)
    with pytest.raises(InternalError, match="closed"):
        forward(sequences.batch({0: tokens(3)}))


@linux
def test_threads_are_bound_only_to_cores_that_are_all_this_process_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 2, 9})
    assert cores_for(0) == [2, 5, 9]
    assert cores_for(3) == [2, 5, 9]
    assert cores_for(8) == [2, 5, 9], "never more threads than cores"
    assert cores_for(2) == [-1, -1], "which two is not for us to say"


def test_a_step_leaves_the_callers_affinity_alone() -> None:
    forward, sequences = native(build("llama"), threads=2)
    before = os.sched_getaffinity(0)
    forward(sequences.batch({0: tokens(20)}))
    assert os.sched_getaffinity(0) == before
    forward.close()


@linux
def test_memory_is_steady_over_many_steps() -> None:
    model = build("mistral")
    forward, sequences = native(model, threads=1)
    lengths = (40, 1, 3, 60, 1)

    def round_of_steps() -> None:
        for length in lengths:
            sequences.computed = [0, 0, 0]
            forward(sequences.batch({0: tokens(length), 1: tokens(5)}))

    for _ in range(10):
        round_of_steps()
    memory = resident_bytes()
    for _ in range(200):
        round_of_steps()
    assert resident_bytes() - memory < 2 << 20


def test_other_threads_run_while_a_step_does() -> None:
    """The GIL is released: another Python thread makes progress during one long step."""
    model = build("llama")
    forward, _ = native(model)
    sequences = Sequences(forward, model, windows(model.config), length=2048)
    batch = sequences.batch({0: tokens(2000)}, [1999])
    running, counted = threading.Event(), [0]
    stop = threading.Event()

    def count() -> None:
        running.set()
        while not stop.is_set():
            counted[0] += 1

    counter = threading.Thread(target=count)
    counter.start()
    assert running.wait(10)
    before = counted[0]
    forward(batch)
    during = counted[0] - before
    stop.set()
    counter.join(10)
    assert during > 10
    assert torch.isfinite(sequences.cache[1]).any()
