"""Nodes read each other's host-memory tiers over NIXL: for a prefix that another node has, and to continue another node's request."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.engine.config import AsyncScheduling, SchedulerConfig
from tandem.kvtransfer.config import TierConfig, TransferConfig
from tandem.kvtransfer.offload.scheduler_half import TierScheduler
from tandem.wire.requests import CachePeers, KVTransferParams, TierStatus, TransferRole
from tests.engine.made_requests import made_request
from tests.engine.model.tiny import save
from tests.integration.one_engine import PATIENCE_S, OneEngine
from tests.more import more

BLOCK = 4
PROMPT = [3 + 7 * i % 120 for i in range(70)]
FULL = 68  # tokens in the prompt's full blocks
COUNT = 120  # tokens of an answer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("model"))


# And how much of a conversation's first turn, 70 tokens and an answer of 8, its tier has for the second
KINDS = {
    "llama": 76,
    "gemma3": 76,  # all of it, and the window before its end
    "mistral-window": 76,
    "llama4": 76,  # and the chunk that its end lies in
    "qwen3.5": 68,  # states are kept at the end of the prompt's last block
    "recurrent-gemma": 68,  # and a window
    "mamba2": 68,  # and nothing else
}


FURTHER = ["mistral-window", "llama4", "recurrent-gemma", "mamba2"]


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3.5", *more(FURTHER)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model_of_kind(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(kind, tmp_path_factory.mktemp(kind))


def start(
    model: Path,
    name: str,
    factor: int = 1,
    *,
    shares: bool = True,
    scheduler: SchedulerConfig | None = None,
    checkpoint_tokens: int = BLOCK,
) -> OneEngine:
    return OneEngine.start(
        model,
        name,
        BLOCK,
        TransferConfig(connector="nixl"),
        memory_bytes=8 << 20,
        prefix_caching=True,
        checkpoint_tokens=checkpoint_tokens,
        scheduler=scheduler,
        tiers=[TierConfig(cpu=4 << 20, block_factor=factor)],
        shares=shares,
    )


@contextlib.contextmanager
def trio(model: Path) -> Iterator[tuple[OneEngine, OneEngine, OneEngine]]:
    """Two that share their tiers, and one that says what is right."""
    with start(model, "a") as a, start(model, "b") as b, start(model, "alone", shares=False) as alone:
        yield a, b, alone


def tier(node: OneEngine) -> TierStatus:
    (status,) = node.stats().tiers
    return status


def go_on(first: OneEngine, second: OneEngine, name: str, tokens: list[int]) -> None:
    """Steps both nodes until the request at the second one has ended."""
    until = time.monotonic() + PATIENCE_S
    while not second.run(name, tokens, until):
        first.run("nothing", [], until)


@pytest.mark.parametrize("factor", [1, 4])
def test_a_prefix_that_another_node_has_is_copied_and_not_computed(model: Path, factor: int) -> None:
    with start(model, "a", factor) as a, start(model, "b", factor) as b:
        expected = a.answer("r", PROMPT, 8)
        tokens: list[int] = []
        b.add("r", PROMPT, 8, None, cache_peers=CachePeers(source=a.tier))
        go_on(a, b, "r", tokens)
        assert tokens == expected
        stats = b.engine.scheduler.stats()
        copied = FULL // (BLOCK * factor) * BLOCK * factor
        assert (stats.prompt_tokens_loaded, stats.prompt_tokens_computed) == (copied, 70 - copied)
        assert tier(b).fetched_bytes == copied // BLOCK * a.engine.runner.kv_cache[0].nbytes
        settle(a, b)


def test_what_all_groups_of_a_model_need_is_copied(kind: str, model_of_kind: Path) -> None:
    with trio(model_of_kind) as (a, b, alone):
        turn = [*PROMPT, *a.answer("r", PROMPT, 8), 9, 8, 7]
        settle(a, b)
        expected = alone.answer("r", turn, 8)
        tokens: list[int] = []
        b.add("r", turn, 8, None, cache_peers=CachePeers(source=a.tier))
        go_on(a, b, "r", tokens)
        assert tokens == expected
        stats = b.engine.scheduler.stats()
        found = KINDS[kind]
        assert (stats.prompt_tokens_loaded, stats.prompt_tokens_computed) == (found, len(turn) - found)
        assert tier(b).fetched_bytes == tier(b).loaded_bytes > 0, "nothing is copied that is not of use"
        settle(a, b)


def test_a_node_that_does_not_answer_is_not_waited_for(model: Path) -> None:
    with start(model, "a") as a, start(model, "b") as b:
        expected = a.answer("r", PROMPT, 8)
        tokens: list[int] = []
        b.add("r", PROMPT, 8, None, cache_peers=CachePeers(source=a.tier))
        until = time.monotonic() + PATIENCE_S
        while not b.run("r", tokens, until):  # the other does not step
            pass
        assert tokens == expected
        assert b.engine.scheduler.stats().prompt_tokens_computed == 70
        settle(a, b)


def sharing_of(node: OneEngine) -> TierScheduler:
    planner = node.engine.scheduler.state.connector
    (part,) = [part for part in planner._parts if isinstance(part, TierScheduler)]  # type: ignore[union-attr]
    return part


def blocks_there(node: OneEngine, tokens: list[int]) -> int:
    """The length of the prefix of `tokens` that the node's tier has."""
    half, request = (sharing_of(node), made_request("r", tokens))
    hasher = node.engine.scheduler.block_hasher
    assert hasher is not None
    request.hash_with(hasher)
    return half.prefixes.end_of_prefix(half._tier.manager, request, 0, len(tokens) // BLOCK)


def test_a_mirror_goes_on_from_the_last_place_where_every_group_has_its_part(kind: str, model_of_kind: Path) -> None:
    with trio(model_of_kind) as (a, b, alone):
        expected = alone.answer("whole", PROMPT, COUNT)
        said: list[int] = []
        a.add("r", PROMPT, COUNT, None, cache_peers=CachePeers(mirror=b.tier))
        until = time.monotonic() + PATIENCE_S
        while len(said) < 60 or blocks_there(b, PROMPT + said) < (70 + len(said)) // BLOCK - 3:
            assert not a.run("r", said, until), "the mirror never came near"
            b.run("nothing", [], until)
        near = blocks_there(b, PROMPT + said) * BLOCK
        a.engine.shutdown()
        tokens: list[int] = []
        b.add("r", PROMPT, COUNT, None, output=said)
        while not b.run("r", tokens, until):
            pass
        assert said + tokens == expected
        assert b.engine.scheduler.stats().prompt_tokens_loaded == 70
        assert tier(b).loaded_tokens >= near
        # What the answer has left behind is not kept: 8 blocks beyond a window, and three checkpoints.
        for node in (a, b):
            entries = sharing_of(node).entries.values()
            trails = [trail for entry in entries for trail in entry.trail.values()]
            assert all(len(trail) < 3 * 12 + 1 for trail in trails)


AHEAD = SchedulerConfig(async_scheduling=AsyncScheduling.ALWAYS)
GUESSES = SchedulerConfig(num_speculative_tokens=3)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gemma3", GUESSES),
        ("qwen3.5", AHEAD),
        *more([("gemma3", None), ("gemma3", AHEAD), ("qwen3.5", None), ("qwen3.5", GUESSES)]),
    ],
)
def test_a_handed_over_answer_is_mirrored_too_however_its_steps_are_planned(
    tmp_path: Path, name: str, config: SchedulerConfig | None
) -> None:
    """After the handover the decode node has a window of the prompt, and states that no block ends with."""
    model = save(name, tmp_path)
    apart = 16
    with contextlib.ExitStack() as stack:
        p, d, m = (stack.enter_context(start(model, node, scheduler=config, checkpoint_tokens=apart)) for node in "pdm")
        alone = stack.enter_context(start(model, "alone", shares=False))
        prompt = PROMPT[:46] + PROMPT[:24]  # repeated, so that drafts can be guessed
        expected = alone.answer("whole", prompt, COUNT)
        said: list[int] = []
        first: list[int] = []
        until = time.monotonic() + PATIENCE_S
        consume = KVTransferParams("t", TransferRole.CONSUME, p.address)
        produce = KVTransferParams("t", TransferRole.PRODUCE, d.address)
        d.add("r", prompt, COUNT, consume, cache_peers=CachePeers(mirror=m.tier))
        p.add("r", prompt, 1, produce)
        a_step = 4 if config is GUESSES else 1  # tokens, at most
        lag = (2 + 2 * a_step) * BLOCK + (apart if name == "qwen3.5" else 0)
        while len(said) < 50 or blocks_there(m, prompt + said) * BLOCK < 70 + len(said) - lag:
            p.run("r", first, until)
            assert not d.run("r", said, until), "the mirror never came near"
            m.run("nothing", [], until)
        assert d.engine.scheduler.stats().prompt_tokens_computed == 0
        d.engine.scheduler.check_integrity()
        near = blocks_there(m, prompt + said) * BLOCK
        d.engine.shutdown()
        tokens: list[int] = []
        m.add("r", prompt, COUNT, None, output=said)
        while not m.run("r", tokens, until):
            pass
        assert said + tokens == expected
        assert m.engine.scheduler.stats().prompt_tokens_loaded == 70
        assert tier(m).loaded_tokens >= near


def settle(*nodes: OneEngine) -> None:
    """Steps until no node waits for another or keeps blocks for it."""
    until = time.monotonic() + PATIENCE_S
    for node in nodes:
        part = sharing_of(node)
        sharing = part._tier.sharing
        assert sharing is not None
        while sharing.lender.num_leases or sharing.fetches or node.engine.scheduler.stats().held_blocks:
            for other in nodes:
                other.run("the end of copies", [], until)
        part._tier.manager.check_integrity()  # type: ignore[attr-defined]
