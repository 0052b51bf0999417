"""A checkpoint's own head (multi-token prediction): the tokens are those without it, and its drafts are those of transformers' head, which
reads the whole text at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine import mtp_files
from tests.engine.model import tiny
from tests.engine.model.driver import Driver
from tests.engine.test_draft_model import (
    GREEDY,
    NEW_TOKENS,
    SEEDED,
    answers,
    driven,
    expect_guesses,
    refused,
    start,
    stats,
)
from tests.more import more


@pytest.fixture(params=["deepseek-v3", *more(["glm4-moe", "qwen3-next"])])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(kind: str, tmp_path: Path) -> Path:
    return mtp_files.save(kind, tmp_path)


def test_it_changes_no_token(model: Path) -> None:
    engine, plain = start(model, "mtp"), start(model, guesses=0)
    for sampling in (GREEDY, SEEDED):
        assert answers(engine, sampling) == answers(plain, sampling)
    found = stats(engine)
    assert 0 < found.speculative_accepted < found.speculative_drafted


def test_its_guesses_are_those_of_transformers_head(model: Path, kind: str) -> None:
    expect_guesses(Driver(driven(model, "mtp")), mtp_files.ReferenceHead(model, kind), 3)


def test_a_head_that_is_right_saves_steps(kind: str, tmp_path: Path) -> None:
    path = mtp_files.save(kind, tmp_path, right=True)
    engine, plain = start(path, "mtp"), start(path, guesses=0)
    assert answers(engine) == answers(plain)
    found = stats(engine)
    assert found.speculative_accepted == found.speculative_drafted >= NEW_TOKENS
    assert plain.engine.scheduler.stats().decode_steps > 2 * found.decode_steps


@pytest.mark.parametrize("without", ["deepseek-v3", "llama"])
def test_a_checkpoint_without_one_is_refused(without: str, tmp_path: Path) -> None:
    assert f"{without} has no such head" in refused(tiny.save(without, tmp_path), "mtp")
