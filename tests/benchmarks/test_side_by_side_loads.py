from __future__ import annotations

import asyncio
import io

from rich.console import Console

from benchmarks.side_by_side.loads import ALONE, BESIDE, LONG, SHARED, Examiner, LoadPlan, LoadQuestions, cells_of
from tandem.loadgen.vocabulary import IdVocabulary, TextVocabulary
from tandem.loadgen.workload import Lengths
from tests.loadgen.fake_server import Exchange, complete, serving
from tests.loadgen.made_tokenizers import byte_level, shared_beginning

TINY = LoadPlan(
    closed_loops=((1, 2), (4, 6)),
    prompt=Lengths(20, 4),
    chat_users=2,
    chat=Lengths(10, 3),
    chats_alone_s=0.05,
    long_prompts=2,
    long=Lengths(60, 2),
    long_every_s=0.05,
    shared_users=2,
    shared_requests=4,
    shared_prefix=50,
    shared=Lengths(5, 2),
    at_most_s=20.0,
)
VOCABULARY = TextVocabulary(byte_level())


async def paced(exchange: Exchange) -> None:
    await asyncio.sleep(0.005)
    await complete(exchange)


async def test_every_load_is_asked_of_a_system_and_every_answer_kept() -> None:
    async with serving(paced) as server:
        questions = LoadQuestions.draw(TINY, VOCABULARY, seed=1)
        examiner = Examiner(server.url, "smol", TINY, questions, Console(file=io.StringIO()), "fake")
        first_ttft_s, measured = await asyncio.to_thread(examiner.examine)
    assert first_ttft_s >= 0.005
    counts = {each.label: len(each.timelines) for each in measured}
    assert list(counts) == cells_of(TINY)
    assert (counts["1 user"], counts["4 users"], counts[LONG], counts[SHARED]) == (2, 6, 2, 4)
    assert counts[ALONE] > 0
    assert counts[BESIDE] > 0
    assert all(timeline.succeeded for each in measured for timeline in each.timelines)
    assert len(server.requests) == sum(counts.values()) + 5 + 1  # warm-ups: of each kind, and of the shared prefix


def test_every_run_asks_new_questions_and_every_system_the_same() -> None:
    first, again, next_run = (LoadQuestions.draw(TINY, VOCABULARY, seed) for seed in (1, 1, 2))
    assert first == again
    asked = {session.turns[0].prompt for session in first.closed_loops[1]}
    assert not asked & {session.turns[0].prompt for session in next_run.closed_loops[1]}


def test_nothing_that_is_measured_was_asked_before_in_the_same_run() -> None:
    questions = LoadQuestions.draw(TINY, IdVocabulary(byte_level()), seed=1)
    groups = [questions.warm_up, *questions.closed_loops, questions.chats_alone, questions.chats_beside]
    prompts = [session.turns[0].prompt for group in groups for session in group]
    assert len(set(prompts)) == len(prompts)
    heads = {prompt[:8] for prompt in prompts}
    assert len(heads) == len(prompts)
    one, other = (session.turns[0].prompt for session in questions.shared[:2])
    assert shared_beginning(one, other) >= 50
