"""Thousands of random runs of a scheduler, each audited after every step.

A run follows from its number alone: `World` has the events, and a failure names the run. TANDEM_RANDOM_RUNS sets how many runs there
are; the default is a few hundred. Slow, because there are many.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from tandem.engine.config import Reserve
from tandem.engine.scheduling import pace
from tandem.kvtransfer.config import LoadFailurePolicy
from tandem.wire.images import MediaFeature
from tests.engine.scheduling.model import next_token
from tests.engine.scheduling.world import GROUPS, GROUPS_WITH_STATES, Source, World
from tests.more import more

RUNS = int(os.environ.get("TANDEM_RANDOM_RUNS", "120"))
BATCHES = 12
REMEMBERED = (171, 3687)  # runs that were the only ones of thousands to show a fault


def random_world(
    number: int,
    draw: random.Random,
    *,
    ahead: bool,
    states: bool,
    now: Callable[[], float] | None,
    images: random.Random | None,
) -> World:
    groups = draw.choice(list(GROUPS_WITH_STATES if states else GROUPS))
    return World(
        groups,
        ahead=ahead,
        quick_peers=number % 2 == 0,
        policy=draw.choice(["fcfs", "priority"]) if now is None else "continuum",
        now=now or (lambda: 0.0),
        caching=draw.random() < 0.85,
        checkpoint_tokens=number % 4 * 2,
        num_blocks=draw.choice([9, 12, 16, 40]),
        max_num_seqs=draw.choice([1, 2, 4, 8]),
        max_num_batched_tokens=draw.choice([4, 9, 30, 200]),
        long_prefill_token_threshold=draw.choice([0, 0, 5]),
        reserve=draw.choice(list(Reserve)),
        num_speculative_tokens=draw.choice([0, 0, 2]),
        max_loras=draw.choice([0, 1, 2]),
        on_failure=draw.choice(list(LoadFailurePolicy)),
        with_connector=draw.random() < 0.8,
        **(random_pace(number) if number % 3 == 1 else {}),
        **(
            {"encoder_tokens": images.choice([7, 9, 20]), "max_encoder_tokens": images.choice([1, 6, 30])}
            if images
            else {}
        ),
    )


def random_pace(number: int) -> dict[str, Any]:
    """A configuration with random step times, in which prompts get as many tokens as fit into a step."""
    draw, now = random.Random(-number), 0.0

    def clock() -> float:
        nonlocal now
        now += draw.choice([0.0, 0.001, 0.02, 0.5])
        return now

    return {"clock": clock, "step_target_ms": 20.0}


@pytest.fixture(autouse=True)
def prompts_may_be_cut_to_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "FEWEST_TOKENS", 2)


IMAGES = {"a/0": 1, "a/1": 4, "b/0": 7, "c/0": 3, "d/0": 5}


def random_media(draw: random.Random, prompt: list[int], at: int) -> list[MediaFeature]:
    """Runs of a prompt's tokens that stand for parts of images. Those that begin alike have the same ones there."""
    media = []
    while at < len(prompt):
        identifier = random.Random(prompt[at] if draw.random() < 0.8 else draw.random()).choice(list(IMAGES))
        if at + IMAGES[identifier] > len(prompt):
            break
        media.append(MediaFeature(identifier, at, IMAGES[identifier]))
        at += IMAGES[identifier] + draw.choice([0, 1, 4])
    return media


def run(number: int, ahead: bool, states: bool = False, *, jobs: bool = False, with_images: bool = False) -> None:
    """`jobs`: under continuum, with turns of jobs whose tools are as quick as chance will have it."""
    images = random.Random(number + 2) if with_images else None
    draw, of_jobs, seconds = random.Random(number), random.Random(number + 1), 0.0
    now = (lambda: seconds) if jobs else None
    of_idle_work = random.Random(number + 3) if number % 5 == 3 else None
    world = random_world(number, draw, ahead=ahead, states=states, now=now, images=images)
    if draw.random() < 0.5 and not ahead:
        world.model.propose = lambda request_id, tokens: [
            *([next_token(tokens)] if draw.random() < 0.6 else []),
            *draw.choices(range(5), k=draw.randrange(2)),
        ]
    prefixes = [[draw.randrange(50) for _ in range(24)] for _ in range(2)]
    sources = draw.choices(list(Source), k=3)
    for _ in range(draw.choice([10, 40])):
        for _ in range(draw.choice([0, 0, 0, 1, 3])):
            prefix = draw.choice(prefixes)[: draw.randrange(24)]
            prompt = prefix + [draw.randrange(50) for _ in range(draw.randrange(1, 8))]
            fields: dict[str, Any] = {}
            if images and images.random() < 0.7:
                fields = {"media": random_media(images, prompt, images.randrange(6)), "images": [b"file"]}
            world.add(
                prompt,
                max_tokens=draw.randrange(1, 12),
                source=draw.choice(sources),
                deferrals=draw.choice([0, 0, 2]),
                num_moved=draw.choice([0, 0, 3]),
                priority=draw.randrange(-1, 2),
                lora=draw.choice([None, None, "x", "y", "z"]),
                cache_salt=draw.choice([None, None, "s"]),
                **fields,
                **({"when_idle": of_idle_work.random() < 0.5} if of_idle_work else {}),
                **(
                    {"job_id": of_jobs.choice([None, "x", "y", "z"]), "is_last_step": of_jobs.random() < 0.1}
                    if jobs
                    else {}
                ),
            )
        match draw.randrange(14):
            case 0:
                world.abort(draw.randrange(100))
            case 1 | 2:
                world.peer_writes(draw.randrange(100), good=draw.random() < 0.5)
            case 3 | 4:
                world.conclude(draw.randrange(100))
            case 5:
                world.conclude(draw.randrange(100), num_valid=draw.randrange(30), unsafe=number % 2 == 1)
            case 6:
                world.conclude(draw.randrange(100), spoil=True)
            case 7:
                world.spoil_next = True
            case 8 | 9:
                world.send(draw.randrange(100))
                world.release(0)
            case 10 | 11:
                world.reset_prefix_cache()
        world.step()
        if jobs:
            ended = [request for request in world.requests.values() if request.is_finished and request.facts.job_id]
            if ended and of_jobs.random() < 0.5:
                turn = of_jobs.choice(ended)
                assert turn.facts.job_id is not None
                tools = of_jobs.choice([None, [], ["quick"], ["slow", "quick"]])
                world.scheduler.turn_ended(turn.facts.job_id, turn.request_id, tools)
            seconds += of_jobs.choice([0.0, 0.1, 1.0, 3.0])
    world.settle()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("number", REMEMBERED)
def test_runs_that_once_went_wrong(number, ahead):
    run(number, ahead)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("number", range(6))
def test_runs_with_recurrent_states(number, ahead):
    run(number, ahead, states=True)


def play(numbers, ahead, **kind):
    for number in numbers:
        try:
            run(number, ahead, **kind)
        except BaseException as problem:
            problem.add_note(f"run {number} {kind or ''}")
            raise


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("batch", range(3))
def test_runs_with_images(batch, ahead):
    play(range(batch, max(RUNS // 6, 1), 3), ahead, with_images=True)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("batch", [*range(4), *more(range(4, BATCHES))])
def test_every_random_run_ends_as_it_must(batch, ahead):
    play(range(batch, RUNS, BATCHES), ahead)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("batch", [0, *more([1, 2])])
def test_every_random_run_with_states_ends_as_it_must(batch, ahead):
    play(range(batch, RUNS // 4, 3), ahead, states=True)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("number", range(12))
def test_runs_with_pinned_turns(number, ahead):
    run(number, ahead, jobs=True)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [0, *more([1, 2, 3])])
def test_many_runs_with_pinned_turns(batch):
    for number in range(100 + batch, 100 + RUNS // 2, 4):
        run(number, number % 4 < 2, number % 5 == 0, jobs=True)
