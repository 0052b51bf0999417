"""Real models with cache tiers give the same text as without, whatever is preempted, evicted and loaded."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.model.loading import load_runner
from tandem.engine.model.native.forward import NativeLlamaForward
from tandem.engine.model.torch_runner import TorchRunner
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.kvtransfer.base import ConnectorContext
from tandem.kvtransfer.config import TierConfig, TransferConfig
from tandem.kvtransfer.multi import create_connector
from tandem.kvtransfer.offload import scheduler_half
from tandem.kvtransfer.offload.disk import HEADER_BYTES, SlotFile
from tandem.wire.requests import TierStatus
from tandem.wire.sampling import SamplingParams
from tests.engine.made_requests import made_request
from tests.engine.model import tiny
from tests.more import more

BLOCK = 4
BLOCKS = 40
AT_ONCE = 6
PATIENCE_S = 60.0


class Conversations:
    """Several conversations at once, each of a few turns; a turn's prompt repeats the conversation so far."""

    def __init__(self, runner: TorchRunner, tiers: list[TierConfig]) -> None:
        config = SchedulerConfig(max_num_seqs=AT_ONCE, max_num_batched_tokens=48, max_model_len=120)
        cache = CacheConfig(block_size=BLOCK, hash_seed="x", tiers=tiers, checkpoint_tokens=BLOCK)
        info = runner.info
        # States of those that run, and as many checkpoints.
        blocks = min(BLOCKS + 2 * AT_ONCE * info.state_blocks, info.num_blocks)
        self.woken = threading.Event()
        planner, mover = None, None
        if tiers:
            planner, mover = create_connector(
                ConnectorContext(
                    "n", 1, "127.0.0.1", BLOCK, TransferConfig(), self.woken.set,
                    has_peers=False, tiers=tiers, groups=info.groups, state_blocks=info.state_blocks,
                )
            )  # fmt: skip
        self.scheduler = Scheduler(
            config, cache, info.groups, blocks, info.max_model_len, connector=planner, clock=lambda: 0.0
        )
        self.engine = Engine(self.scheduler, runner, mover, debug=True)
        self.answers: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}

    def run(self, seed: int, sessions: int) -> None:
        draw = random.Random(seed)
        talks = {f"s{i}": [draw.randrange(5, tiny.VOCAB) for _ in range(20)] for i in range(sessions)}
        turns = {name: draw.randrange(1, 4) for name in talks}
        waiting, live = list(talks), dict[str, str]()
        while waiting or live:
            while waiting and len(live) < AT_ONCE:
                name = waiting.pop(0)
                live[f"{name}.{turns[name]}"] = name
                sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
                request = made_request(f"{name}.{turns[name]}", talks[name], sampling)
                self.answers[request.request_id], self.logprobs[request.request_id] = [], []
                self.engine.add_request(request)
            for request_id in self.step():
                name = live.pop(request_id)
                turns[name] -= 1
                # What is asked next does not depend on when answers end.
                follow_up = random.Random(request_id)
                asked = [follow_up.randrange(5, tiny.VOCAB) for _ in range(6)]
                talks[name] = [*talks[name], *self.answers[request_id], *asked]
                if turns[name]:
                    waiting.insert(follow_up.randrange(len(waiting) + 1), name)

    def step(self) -> list[str]:
        self.woken.clear()
        result = self.engine.step()
        ended = []
        for update in result.updates:
            assert update.error is None
            self.answers[update.request_id] += update.token_ids
            if update.request_id in self.logprobs:
                self.logprobs[update.request_id] += [each.logprob for each in update.logprobs or ()]
            if update.finish is not None:
                ended.append(update.request_id)
        if not result.progressed and not self.scheduler.has_work():
            assert self.woken.wait(PATIENCE_S), "nothing goes on"
        return ended

    def settle(self) -> None:
        while self.scheduler.stats().free_blocks < self.scheduler.stats().total_blocks:
            self.step()

    @property
    def tiers(self) -> list[TierStatus]:
        assert self.engine.worker is not None
        return self.engine.worker.stats().tiers


@pytest.fixture(scope="module")
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TorchRunner:
    """A runner for one kind of model, on the native or on the general path."""
    kind, native = request.param
    model = tiny.save(kind, tmp_path_factory.mktemp("model"))
    config = SchedulerConfig(max_num_seqs=AT_ONCE, max_num_batched_tokens=48, max_model_len=120)
    return load_runner(
        ModelConfig(path=str(model), dtype="float32", device="cpu", threads=1),
        CacheConfig(block_size=BLOCK, memory_bytes=4 << 20),
        config,
        native=native,
    )


@pytest.mark.parametrize(
    ("runner", "sessions"),
    [(("llama", True), 30), *more([(("qwen3.5", False), 10), (("recurrent-gemma", False), 10)])],
    indirect=["runner"],
)
def test_a_restarted_engine_goes_on_from_its_disk(runner: TorchRunner, sessions: int, tmp_path: Path) -> None:
    """Below a tier in host memory that is too small for all. The last start finds a file that was torn meanwhile. On the native path
    what is loaded gives the same bits as what is computed."""
    block_bytes, states = runner.kv_cache[0].nbytes, runner.info.state_blocks
    tiers = [
        TierConfig(cpu=(20 + states) * block_bytes),
        TierConfig(disk=str(tmp_path), size=(1000 + 100 * states) * (block_bytes + 4096)),
    ]
    said, logprobs, computed = [], [], []
    for turn in range(4):
        if turn == 3:
            tear(tmp_path, HEADER_BYTES + block_bytes)
        talks = Conversations(runner, [] if turn == 0 else tiers)
        talks.run(seed=7, sessions=sessions)
        talks.settle()
        said.append(talks.answers)
        logprobs.append(talks.logprobs)
        stats = talks.scheduler.stats()
        if turn:
            assert all(tier.used_bytes <= tier.total_bytes for tier in talks.tiers)
            near, far = talks.tiers
            assert near.evicted_bytes > 0
            assert turn == 3 or far.loaded_bytes > near.loaded_bytes * (turn == 2)
            assert (stats.loads_failed > 0) == (turn == 3)
            talks.engine.shutdown()
        computed.append(stats.prompt_tokens_computed)
        if turn == 2 and not states:
            # Only what fills no block is computed, and each prompt's last token.
            assert computed[2] < 0.5 * stats.prompt_tokens_loaded
        runner.forget_requests()
    assert said[0] == said[1] == said[2] == said[3]
    assert logprobs[0] == logprobs[1] == logprobs[2] or not isinstance(runner.forward, NativeLlamaForward)
    assert computed[2] < computed[1]


@pytest.mark.parametrize("runner", [("llama", True)], indirect=True)
def test_while_a_disk_hangs_every_request_is_answered_and_every_block_comes_back(
    runner: TorchRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first read does not return before the end, in a pool so small that requests are preempted."""
    tier = TierConfig(disk=str(tmp_path), size=1000 * (runner.kv_cache[0].nbytes + 4096))
    monkeypatch.setattr(scheduler_half, "LEAST_LOAD_S", 0.05)
    go_on, read, said = threading.Event(), SlotFile.read, []

    def hangs(self: SlotFile, slot: int, key: bytes, into: memoryview) -> bool:
        assert go_on.wait(PATIENCE_S)
        return read(self, slot, key, into)

    for turn in range(2):
        if turn:
            monkeypatch.setattr(SlotFile, "read", hangs)
        talks = Conversations(runner, [tier])
        talks.run(seed=7, sessions=30)
        talks.settle()
        said.append(talks.answers)
        if turn:
            assert "not done in its time" in talks.tiers[0].left_out
            assert talks.scheduler.stats().preemptions > 0
            assert talks.scheduler.stats().prompt_tokens_loaded == 0
            go_on.set()
        talks.engine.shutdown()
        runner.forget_requests()
    assert said[0] == said[1]


def tear(folder: Path, slot_bytes: int) -> None:
    """Changes bytes in every fifth chunk, so that they do not match the chunk's header."""
    (path,) = (each for each in folder.iterdir() if each.suffix != ".sources")
    with path.open("r+b") as file:
        for start in range(HEADER_BYTES, path.stat().st_size, 5 * slot_bytes):
            file.seek(start + HEADER_BYTES)
            file.write(b"torn")


@pytest.mark.parametrize("runner", [("llama", True), ("llama", False)], indirect=["runner"])
def test_decoding_after_a_prompt_that_nobody_computed(runner: TorchRunner) -> None:
    talks = Conversations(runner, [TierConfig(spec="synthetic")])
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    talks.answers["long"] = []
    talks.engine.add_request(made_request("long", [5 + i % 90 for i in range(101)], sampling))
    while not talks.step():
        pass
    talks.settle()
    stats = talks.scheduler.stats()
    assert (stats.prompt_tokens_loaded, stats.prompt_tokens_computed) == (100, 1)
    assert len(talks.answers["long"]) == 12
    assert runner.kv_cache.isfinite().all()
    talks.engine.shutdown()
    runner.forget_requests()
