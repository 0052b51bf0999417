"""Everything at once on one engine, at random: prefix hits, salts, tiers, drafts, images, adapters that are replaced, prompts of embeddings,
states, windows, resets, the canary, preemptions, aborts, and a second life with the same disk. Each answer must be that of an engine which
serves one request at a time and has no cache.

In a tenth of the runs some blocks of the device become wrong. That is found after a while, and from then on every answer must be right.
A run follows from its number. TANDEM_MIXED_ANSWERS sets how many answers are compared.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.config import CacheConfig, ModelConfig, SchedulerConfig
from tandem.engine.core import Engine
from tandem.engine.model.loading import load_runner
from tandem.engine.model.torch_runner import TorchRunner
from tandem.engine.request import Request, RequestStatus
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.kvtransfer.base import ConnectorContext
from tandem.kvtransfer.config import EvictionPolicy, TierConfig, TransferConfig
from tandem.kvtransfer.multi import create_connector
from tandem.node.canary.part import CanaryChecks
from tandem.wire.adapters import identity_of
from tandem.wire.embeds import PLACEHOLDER
from tandem.wire.sampling import FinishReason, SamplingParams
from tests.engine.made_requests import made_request
from tests.engine.model import tiny
from tests.engine.model.adapter_files import save_adapter
from tests.engine.model.tiny_vision import SMOLVLM, prompt_of
from tests.engine.test_prompt_embeds import embeds_of
from tests.more import more
from tests.pictures import picture

ANSWERS = int(os.environ.get("TANDEM_MIXED_ANSWERS", "50"))
KINDS = ["llama", "images", *more(["gemma3", "mistral-window", "llama4", "qwen3.5", "recurrent-gemma"])]
BLOCK = 4
DRAFTS = 2
REQUESTS = 18  # of one life of an engine
PATIENCE_S = 60.0


@dataclasses.dataclass(frozen=True)
class Question:
    prompt: Sequence[int]
    sampling: SamplingParams
    fields: dict[str, Any]
    cache_salt: str | None = None

    def as_request(self, name: str, **more: Any) -> Request:
        return made_request(name, self.prompt, self.sampling, cache_salt=self.cache_salt, **self.fields, **more)


def scheduling(kind: str, drafts: int, **options: Any) -> SchedulerConfig:
    return SchedulerConfig(
        max_model_len=160,
        num_speculative_tokens=drafts,
        max_loras=2 if kind == "llama" else 0,
        max_encoder_tokens=16,
        **options,
    )


class Lab:
    """A model and two engines for it: one that is mixed up, and one that serves each request alone."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.path = SMOLVLM.save(folder) if kind == "images" else tiny.save(kind, folder)
        self.has_adapters = kind == "llama"
        self.versions = [
            save_adapter(self.path, folder / f"adapter-{seed}", seed) if self.has_adapters else folder
            for seed in range(4 if self.has_adapters else 0)
        ]
        self._runners: dict[int, TorchRunner] = {}
        self.alone = self._load(0)
        info = self.alone.info
        cache = CacheConfig(block_size=BLOCK, prefix_caching=False)
        self.judge = Scheduler(
            scheduling(kind, 0), cache, info.groups, info.num_blocks, info.max_model_len, reads_images=kind == "images"
        )
        self.judging = Engine(self.judge, self.alone, None)
        generator = torch.Generator().manual_seed(7)
        self.rows = [torch.randn(count, 32, generator=generator) for count in (9, 21, 38)]

    def runner(self, drafts: int) -> TorchRunner:
        if drafts not in self._runners:
            self._runners[drafts] = self._load(drafts)
        return self._runners[drafts]

    def _load(self, drafts: int) -> TorchRunner:
        adapters = {"law": str(self.versions[0]), "art": str(self.versions[1])} if self.has_adapters else {}
        return load_runner(
            ModelConfig(path=str(self.path), dtype="float32", device="cpu", threads=1, adapters=adapters),
            CacheConfig(block_size=BLOCK, memory_bytes=4 << 20, encoder_tokens=64),
            scheduling(self.kind, drafts),
        )

    def right_answer(self, question: Question) -> list[int]:
        self.judging.add_request(question.as_request("alone"))
        answer: list[int] = []
        while self.judge.has_unfinished_requests():
            for update in self.judging.step().updates:
                assert update.error is None
                answer += update.token_ids
        return answer


@functools.cache
def lab_of(kind: str, folder: Path) -> Lab:
    return Lab(kind, folder)


class MixedRun:
    def __init__(self, lab: Lab, number: int, folder: Path) -> None:
        self.lab = lab
        self.draw = random.Random(number)
        self.goes_wrong = number % 10 == 0
        self.folder = folder
        draw = self.draw
        drafts = draw.choice([0, DRAFTS])
        self.runner = lab.runner(drafts)
        info = self.runner.info
        groups = sum(1 for group in info.groups if not group.blocks_per_request)
        block_bytes = self.runner.kv_cache[0].nbytes
        self.blocks = min(
            draw.choice([30, 44]) + 16 * (groups - 1 + (lab.kind == "images")) + 12 * info.state_blocks, info.num_blocks
        )
        self.config = scheduling(
            lab.kind, drafts, max_num_seqs=draw.choice([2, 4, 6]), max_num_batched_tokens=draw.choice([16, 48])
        )
        policy = draw.choice(list(EvictionPolicy))
        cpu = TierConfig(cpu=(draw.choice([20, 200]) * groups + 20 * info.state_blocks) * block_bytes, policy=policy)
        disk = TierConfig(
            disk=str(folder), size=(400 * groups + 40 * info.state_blocks) * (block_bytes + 4096), policy=policy
        )
        self.tiers = draw.choice([[], [cpu], [disk], [cpu, disk]])
        self.ahead = draw.random() < 0.5
        self.prefixes = [[draw.randrange(5, tiny.VOCAB) for _ in range(40)] for _ in range(3)]
        self.pictures = [picture(seed) for seed in (1, 2, 3)]
        self.questions: dict[str, Question] = {}
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.suspect: set[str] = set()  # what they say may be computed from wrong KV that was not found yet
        self.generation_at_fault: int | None = None  # set while wrong KV is here that was not found
        self.faults = self.found_tokens = self.preemptions = 0

    # ── one life of an engine ──

    def live(self, life: int) -> None:
        info, self.woken = self.runner.info, threading.Event()
        cache = CacheConfig(
            block_size=BLOCK, hash_seed="x", tiers=self.tiers, checkpoint_tokens=BLOCK, encoder_tokens=64
        )
        planner, mover = None, None
        if self.tiers:
            planner, mover = create_connector(
                ConnectorContext(
                    "n", life + 1, "127.0.0.1", BLOCK, TransferConfig(), self.woken.set,
                    has_peers=False, tiers=self.tiers, groups=info.groups, state_blocks=info.state_blocks,
                )
            )  # fmt: skip
        self.scheduler = Scheduler(
            self.config, cache, info.groups, self.blocks, info.max_model_len, connector=planner, clock=lambda: 0.0,
            reads_images=info.images is not None
        )  # fmt: skip
        self.engine = Engine(self.scheduler, self.runner, mover, ahead=self.ahead, debug=True)
        self.canary = self.engine.idle_check = CanaryChecks(self.scheduler, self.runner, 1.0)
        names = [f"{life}.{number}" for number in range(REQUESTS)]
        fault_at = self.draw.randrange(20, 60) if self.goes_wrong and life == 0 else -1
        steps = 0
        while names or self.scheduler.has_unfinished_requests():
            if names and self.draw.random() < 0.35:
                self.ask(names.pop(0))
            steps += 1
            if steps >= fault_at >= 0 and len(self.scheduler.requests) > 2 and not self.faults:
                self.spoil()
            elif self.generation_at_fault is not None and self.draw.random() < 0.03:
                self.discover()
            self.step()
            self.happen()
        if self.generation_at_fault is not None:
            self.discover()
        if self.generation_at_fault is not None:
            self.note_discovery()
        while not (self.is_empty and self.scheduler.has_forgotten):
            self.step()
        stats = self.scheduler.stats()
        self.preemptions += stats.preemptions
        self.found_tokens += stats.prompt_tokens_cached + stats.prompt_tokens_loaded
        self.engine.shutdown()
        self.runner.forget_requests()

    @property
    def is_empty(self) -> bool:
        stats = self.scheduler.stats()
        return stats.free_blocks == stats.total_blocks

    def step(self) -> None:
        self.woken.clear()
        result = self.engine.step()
        self.scheduler.check_integrity()
        for update in result.updates:
            assert update.error is None, (update.request_id, update.error)
            self.answers[update.request_id] += update.token_ids
            if update.finish not in (None, FinishReason.ABORT) and self.draw.random() < 0.3:
                self.canary.received(self.requests[update.request_id])
        if not result.progressed and not self.scheduler.has_work():
            for _ in range(self.draw.randrange(30)):
                if not self.engine.use_idle_time():
                    break
            self.woken.wait(0.002)
        self.note_discovery()

    # ── events ──

    def ask(self, name: str) -> None:
        draw, lab = self.draw, self.lab
        fields: dict[str, Any] = {}
        prompt = draw.choice(self.prefixes)[: draw.choice([0, 17, 32, 40])]
        prompt = prompt + [draw.randrange(5, tiny.VOCAB) for _ in range(draw.randrange(1, 9))]
        cache_salt = draw.choice([None, None, None, "tenant"])
        # The next turn of a conversation; of one that read wrong KV, often the second and third, too.
        asked = sorted(self.suspect & self.answers.keys()) if draw.random() < 0.7 else []
        before = draw.choice(asked or [*self.questions, ""])
        known = self.questions.get(before)
        if known is not None and "media" not in known.fields and len(known.prompt) < 90 and draw.random() < 0.7:
            prompt = [*known.prompt, *self.answers[before], draw.randrange(5, tiny.VOCAB)]
            fields, cache_salt = known.fields, known.cache_salt
        elif lab.kind == "images" and draw.random() < 0.7:
            words: list[str | bytes] = []
            for _ in range(draw.choice([1, 1, 2])):
                words += [draw.choice(["User:", "See ", "What is "]), draw.choice(self.pictures)]
            prompt, media, images = prompt_of([*words, draw.choice(["?", " and why?"])])
            fields = {"media": media, "images": images}
        elif lab.has_adapters and draw.random() < 0.5:
            adapters = self.runner.adapters
            assert adapters is not None
            named = draw.choice(["law", "art"])
            fields = {"lora": identity_of(named, adapters.served[named])}
        elif lab.kind in ("llama", "qwen3.5") and draw.random() < 0.2:
            rows = draw.choice(lab.rows)
            embeds = embeds_of(rows[: draw.randrange(4, len(rows) + 1)])
            fields = {"embeds": embeds, "media": embeds.features()}
            prompt = [PLACEHOLDER] * embeds.count
        sampling = draw.choice([
            {"temperature": 0.0}, {"temperature": 0.0}, {"temperature": 1.0},
            {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
            {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.5}
        ])  # fmt: skip
        question = Question(
            prompt,
            SamplingParams(max_tokens=draw.randrange(1, 14), seed=draw.randrange(99), ignore_eos=True, **sampling),
            fields,
            cache_salt,
        )
        self.questions[name], self.answers[name] = question, []
        request = question.as_request(
            name, priority=0, block_hasher=self.scheduler.block_hasher, arrival_time=float(len(self.questions))
        )
        self.requests[name] = request
        if self.generation_at_fault is not None:
            self.suspect.add(name)
        self.engine.add_request(request)

    def happen(self) -> None:
        draw, chance = self.draw, self.draw.random()
        if chance < 0.02 and self.scheduler.requests:
            name = draw.choice(list(self.scheduler.requests))
            self.aborted.add(name)
            self.engine.abort_requests([name])
        elif chance < 0.03:
            self.scheduler.reset_prefix_cache()
        elif chance < 0.05 and self.lab.has_adapters:
            name, folder = draw.choice(["law", "art"]), draw.choice(self.lab.versions)
            for runner in (self.runner, self.lab.alone):
                assert runner.adapters is not None
                others = {"law", "art"} - {name}
                runner.adapters.serve([runner.adapters.read(name, folder)], others)
        self.note_discovery()

    # ── wrong KV ──

    @property
    def generation(self) -> int:
        return self.scheduler.stats().cache_generation

    def spoil(self) -> None:
        """Half of the device's blocks hold something else."""
        self.faults += 1
        self.generation_at_fault = self.generation
        self.suspect |= self.scheduler.requests.keys()
        blocks = self.draw.sample(range(1, self.blocks), self.blocks // 2)
        self.runner.kv_cache[blocks] = torch.randn(self.runner.kv_cache[blocks].shape) * 3

    def discover(self) -> None:
        if self.draw.random() < 0.5:
            self.scheduler.convict(None)
        else:
            self.scheduler.reset_prefix_cache()
        self.note_discovery()

    def note_discovery(self) -> None:
        """Those that have nothing yet are to be right, too."""
        if self.generation_at_fault is None or self.generation == self.generation_at_fault:
            return
        self.generation_at_fault = None
        untouched = {
            name
            for name, request in self.scheduler.requests.items()
            if request.status is RequestStatus.WAITING and not request.num_computed_tokens
        }
        self.suspect -= untouched

    # ── the answers ──

    def check(self) -> tuple[int, int]:
        """Returns how many answers were compared, and how many of the suspect ones are wrong."""
        wrong = 0
        for name, question in self.questions.items():
            expected, found = self.lab.right_answer(question), self.answers[name]
            if name in self.aborted:
                expected = expected[: len(found)]
            if name in self.suspect:
                wrong += found != expected
            else:
                assert found == expected, f"{name} of {len(self.questions)}: {question}"
        return len(self.questions) - len(self.suspect), wrong


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mixed")


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_that_of_an_engine_without_a_cache(kind: str, folder: Path, tmp_path: Path) -> None:
    (place := folder / kind).mkdir(exist_ok=True)
    lab = lab_of(kind, place)
    compared = wrong = faults = found = preemptions = number = 0
    while compared < ANSWERS // len(KINDS):
        run = MixedRun(lab, number, tmp_path / f"{number}")
        try:
            for life in range(2):
                run.live(life)
            right, suspect = run.check()
        except BaseException as problem:
            problem.add_note(f"run {number} of {kind}")
            raise
        compared, wrong, number = compared + right, wrong + suspect, number + 1
        faults, found, preemptions = (faults + run.faults, found + run.found_tokens, preemptions + run.preemptions)
    print(
        f"{kind}: {number} runs, {compared} answers compared, 0 different; {faults} runs with wrong KV, {wrong} answers wrong before "
        f"it was found; {found} prompt tokens found, {preemptions} preemptions"
    )
    if faults >= 3:
        assert wrong > 0, "the wrong KV changes no answer"
