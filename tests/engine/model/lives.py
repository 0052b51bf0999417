"""Random lives of requests on two nodes: what they share steps with, how their prompts are cut, what of them is found in caches, and where
they go on. A seed says all of it, so a life that changes a bit can be lived again.

What is counted are pairs: the same request alone, on one thread and in one piece, and in such a life.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf

from tandem.engine.model.torch_runner import TorchRunner
from tandem.wire.sampling import SamplingParams
from tests.engine.model import tiny
from tests.engine.model.driver import DrivenRequest, Driver
from tests.engine.model.gguf_files import write_gguf
from tests.engine.model.hooks import Recorder

NUM_TOKENS = 8
LENGTHS = (1, 5, 23, 37, 16, 64, 100)
PROMISED = ("llama", "llama-untied-odd-heads", "mistral-window", "qwen2", "qwen3")
GGUF = "llama-gguf"
_STORED = {
    "attn_q.weight": "Q4_0", "attn_k.weight": "Q4_1", "attn_v.weight": "Q8_0", "attn_output.weight": "Q5_0",
    "ffn_gate.weight": "Q5_1", "token_embd.weight": "Q8_0",
}  # fmt: skip

Bits = tuple[list[int], list[bytes]]
Facts = Callable[[int], dict[str, Any]]
"""What a request has besides its prompt: an adapter, or images."""


def saved(kind: str, folder: Path) -> Path:
    if kind != GGUF:
        return tiny.save(kind, folder)
    kinds = {name: gguf.GGMLQuantizationType[each] for name, each in _STORED.items()}
    write_gguf(tiny.save("llama", folder), folder / "tiny.gguf", quantize=kinds)
    return folder / "tiny.gguf"


def bits_of(request: DrivenRequest) -> Bits:
    return request.output[:NUM_TOKENS], [struct.pack("<d", e.logprob) for e in request.logprobs[:NUM_TOKENS]]


def sampling(index: int) -> SamplingParams:
    return SamplingParams(temperature=float(index % 2), seed=index, logprobs=0)


def alone(runner: TorchRunner, prompts: list[list[int]]) -> list[Bits]:
    """Each prompt's answer, computed in one piece and with no other request."""
    driver, found = Driver(runner), []
    for index, prompt in enumerate(prompts):
        driver.add(f"r{index}", prompt, sampling(index))
        driver.generate(NUM_TOKENS)
        found.append(bits_of(driver.finish(f"r{index}")))
    driver.step({})
    return found


@dataclasses.dataclass
class _Living:
    """One request, and the node that has it."""

    at: int
    request: DrivenRequest


class Lives:
    """Requests of one seed on two nodes. `happened` counts what was done to them."""

    def __init__(
        self, nodes: list[TorchRunner], prompts: list[list[int]], seed: int, facts: Facts = lambda index: {}
    ) -> None:
        self._draw = random.Random(seed)
        self._nodes = [Driver(runner, seed) for runner in nodes]
        self._prompts = prompts
        self._facts = facts
        self._living: dict[str, _Living] = {}
        self.happened: collections.Counter[str] = collections.Counter()

    def run(self, known: list[Bits]) -> list[Bits]:
        """Returns the answers. `known` are the right ones: some drafts are of them."""
        waiting = list(range(len(self._prompts)))
        self._draw.shuffle(waiting)
        answers: dict[int, Bits] = {}
        while waiting or self._living:
            while waiting and (not self._living or self._draw.random() < 0.4):
                self._begin(waiting.pop())
            for name in list(self._living):
                if self._draw.random() < 0.06:
                    self._draw.choice((self._preempt, self._hand_over, self._fail_over))(name)
            for at in range(len(self._nodes)):
                self._step(at, known)
            for name, living in list(self._living.items()):
                if len(living.request.output) >= NUM_TOKENS:
                    answers[int(name)] = bits_of(self._living.pop(name).request)
                    self._nodes[living.at].finish(name)
        for node in self._nodes:
            node.step({})
        return [answers[index] for index in range(len(self._prompts))]

    def _begin(self, index: int) -> None:
        """On a node that computes a prompt with the same beginning, it is found there."""
        at, prompt, facts = self._draw.randrange(2), self._prompts[index], self._facts(index)
        shared: dict[str, int] = {}
        for name, other in self._living.items():
            same = _same_tokens(prompt, other.request.tokens[: other.request.computed])
            tokens = min(same, len(prompt) - 1) // 4 * 4
            if tokens and self._has(other.request, tokens) and facts == self._facts(int(name)):
                shared[name] = tokens
        if shared:
            name = max(shared, key=lambda each: shared[each])
            at = self._living[name].at
            request = self._nodes[at].add(
                str(index), prompt, sampling(index), prefix_of=name, shared_tokens=shared[name], **facts
            )
            self.happened["prefix found"] += 1
        else:
            request = self._nodes[at].add(str(index), prompt, sampling(index), **facts)
        self._living[str(index)] = _Living(at, request)

    def _has(self, request: DrivenRequest, tokens: int) -> bool:
        """Whether the request still has each block that the token after the first `tokens` reads. Of states it has only the last."""
        groups = self._nodes[0].groups
        return not any(group.blocks_per_request for group in groups) and all(
            all(table[max(0, group.first_read(tokens)) // group.block_size : -(-tokens // group.block_size)])
            for group, table in zip(groups, request.blocks, strict=True)
        )

    def _preempt(self, name: str) -> None:
        living = self._living[name]
        self._nodes[living.at].preempt(name)
        self.happened["preempted"] += 1

    def _hand_over(self, name: str) -> None:
        """The other node goes on with the KV, or with some of it: a mirror is behind the node that died."""

        def move(here: Driver, there: Driver) -> DrivenRequest:
            moved = there.adopt(name, here)
            behind = self._draw.randrange(0, moved.computed + 1)
            if self._draw.random() < 0.5 and self._has(here.requests[name], behind):
                moved.computed = behind
                self.happened["mirrored"] += 1
            else:
                self.happened["handed over"] += 1
            return moved

        self._move(name, move)

    def _fail_over(self, name: str) -> None:
        """The other node goes on from the tokens alone."""

        def move(here: Driver, there: Driver) -> DrivenRequest:
            request = here.requests[name]
            self.happened["failed over"] += 1
            prompt = request.tokens[: request.num_prompt]
            facts = self._facts(int(name))
            return there.add(name, prompt, request.sampling, output=request.output, **facts)

        self._move(name, move)

    def _move(self, name: str, move: Callable[[Driver, Driver], DrivenRequest]) -> None:
        living = self._living[name]
        here, there = self._nodes[living.at], self._nodes[1 - living.at]
        if name in there.finished_ids:
            return  # the other node has not been told yet that it lost this request
        moved = move(here, there)
        moved.logprobs = list(living.request.logprobs)
        here.finish(name)
        self._living[name] = _Living(1 - living.at, moved)

    def _step(self, at: int, known: list[Bits]) -> None:
        node, draw = self._nodes[at], self._draw
        work = {}
        for name, living in self._living.items():
            pending = living.request.pending
            if living.at != at or draw.random() < 0.2:
                continue
            work[name] = min(pending, draw.choice((1, draw.randint(1, 9), pending)))
            self._guess(node, living.request, known[int(name)][0])
        accepted = node.num_accepted
        if work:
            node.step(work, Recorder() if draw.random() < 0.3 else None)
        self.happened["drafts accepted"] += node.num_accepted - accepted

    def _guess(self, node: Driver, request: DrivenRequest, right: list[int]) -> None:
        """Sometimes drafts that are right, or right at first, in place of the runner's own."""
        done = len(request.output)
        if done and self._draw.random() < 0.3:
            drafts = right[done : done + self._draw.randint(1, 4)]
            if drafts and self._draw.random() < 0.5:
                drafts[-1] = (drafts[-1] + 1) % tiny.VOCAB
            node.drafts[request.req_id] = drafts


def _same_tokens(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def prompts_of(draw: random.Random) -> list[list[int]]:
    """Prompts of a life; some begin as others do."""
    prompts = [[draw.randrange(3, tiny.VOCAB) for _ in range(draw.choice(LENGTHS))] for _ in range(5)]
    for _ in range(3):
        begin = draw.choice(prompts)
        begin = begin[: draw.randint(1, len(begin))]
        prompts.append([*begin, *(draw.randrange(3, tiny.VOCAB) for _ in range(draw.randint(0, 20)))])
    return prompts
