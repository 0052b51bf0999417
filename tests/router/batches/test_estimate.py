"""When a batch says that it will be done. On a clock that the test sets."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.api.batches.answer_types import BatchObject
from tandem.api.batches.batch_request import BatchRequest
from tandem.router.batches.estimate import tokens_of
from tandem.router.batches.store import BatchStore, ClaimedLine, LineResult

LINES = 400


def answers_take_long(prompt: int, answer: int) -> float:
    return prompt / 900 + answer / 40


def all_tokens_alike(prompt: int, answer: int) -> float:
    return (prompt + answer) / 500


def begun(folder: Path, clock: Callable[[], float], prompts: list[int]) -> tuple[BatchStore, BatchObject]:
    """A job with a line for each of these prompts."""
    store = BatchStore(folder, clock=clock)
    file_id, path = store.files.new_path()
    path.write_bytes(b"x" * 5 * sum(prompts))
    store.files.add(file_id, "", "a", "batch", 5 * sum(prompts), expires=None)
    batch = store.add_job("", BatchRequest(file_id, "/v1/completions", "24h"))
    job = store.take_job()
    assert job is not None
    place = 0
    rows = []
    for number, prompt in enumerate(prompts):
        rows.append((number, place, 5 * prompt, str(number)))
        place += 5 * prompt
    store.add_lines(job, rows)
    store.lines_read(job, LINES)
    return store, batch


@pytest.mark.parametrize("begun_a_second", [2, 3])
def test_lines_that_are_under_way_are_half_done(tmp_path: Path, begun_a_second: int) -> None:
    """Up to a hundred lines share the nodes. When a tenth of them is answered, much more than a tenth is done."""
    together, tokens = 100, 130.0
    now = [1_000_000.0]
    store, batch = begun(tmp_path, lambda: now[0], [100] * LINES)
    began, said, answered = now[0], [], 0
    left: dict[ClaimedLine, float] = {}
    while answered < LINES:
        now[0] += 1.0
        if room := min(together - len(left), begun_a_second):
            left |= {line: tokens for line, _ in store.claim(room)}
        share = tokens / len(left)
        left = {line: more - share for line, more in left.items()}
        done = [line for line, more in left.items() if more <= 1e-6]
        store.record([LineResult(line, well=True, text=b"{}", tokens=int(tokens)) for line in done])
        answered += len(done)
        for line in done:
            del left[line]
        if LINES / 10 <= answered < LINES:
            said.append(store.job(batch.id, "").estimated_completion_at)
    for end in said:
        assert end is not None
        assert abs(end - now[0]) <= 0.2 * (now[0] - began)
    store.close()


@pytest.mark.parametrize(
    ("order", "cost"),
    [
        ("as they come", answers_take_long),
        ("as they come", all_tokens_alike),
        ("short ones first", all_tokens_alike),
        ("long ones first", all_tokens_alike),
    ],
)
def test_a_batch_says_when_it_will_be_done(tmp_path: Path, order: str, cost: Callable[[int, int], float]) -> None:
    """From a tenth of the lines on, it is wrong by at most a fifth of the time that the batch takes."""
    rng = random.Random(1)
    prompts = [rng.randint(20, 400) for _ in range(LINES)]
    if order != "as they come":
        prompts.sort(reverse=order == "long ones first")
    # Longer prompts have longer answers, on the whole.
    answers = [prompt // 4 + rng.randint(10, 60) for prompt in prompts]
    now = [1_000_000.0]
    store, batch = begun(tmp_path, lambda: now[0], prompts)
    assert store.job(batch.id, "").estimated_completion_at is None
    began, said = now[0], []
    while lines := [line for line, _ in store.claim(8)]:
        for line in lines:
            tokens = prompts[line.number] + answers[line.number]
            now[0] += cost(prompts[line.number], answers[line.number])
            store.record([LineResult(line, well=True, text=b"{}", tokens=tokens)])
        end = store.job(batch.id, "").estimated_completion_at
        assert end is not None
        said.append((now[0], end))
    for _, end in said[LINES // 80 :]:
        assert abs(end - now[0]) <= 0.2 * (now[0] - began) + 1
    store.close()


def test_an_answers_tokens_are_those_of_its_usage() -> None:
    assert tokens_of(b'{"usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}}') == 7
    assert tokens_of(b'{"type": "message", "usage": {"input_tokens": 5, "output_tokens": 4}}') == 9
    assert tokens_of(b'{"error": {"message": "no"}}') == tokens_of(b"") == 1
