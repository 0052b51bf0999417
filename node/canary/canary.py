"""A canary for wrong KV: in idle time, the engine recomputes a small share of the prompts whose KV came from a peer, and
compares the two.

A checksum proves that the bytes arrived as they were sent. The canary checks that they were right: it finds a device that
computes wrongly, two nodes whose weights differ, and a block that was reused while it travelled.

The canary runs between steps, a few tokens at a time, and only while the engine is idle. It gives its blocks back as soon as
a request arrives, and begins again later. The KV that it computes is never cached.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections import Counter
from typing import TYPE_CHECKING

from tandem.engine.request import Request
from tandem.engine.scheduling.output import BlockIds, CachedRequestData, NewRequestData, SchedulerOutput
from tandem.kvtransfer.base import NULL_BLOCK_ID
from tandem.wire.requests import RequestFacts
from tandem.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from tandem.engine.model.runner import ModelRunner
    from tandem.engine.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

REQUEST_ID = "canary"
STEP_TOKENS = 128  # computed between two looks at the mailbox
ATTEMPTS = 20  # interrupted checks of one prompt before the canary gives the prompt up
# The largest difference that rounding explains, relative to a block's norm: the two nodes may sum in different orders.
TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 8e-2, "float8_e4m3fn": 0.15}
_NOT_SAMPLED = SamplingParams(temperature=0.0, max_tokens=1)


@dataclasses.dataclass(slots=True)
class CanaryFindings:
    """What the canary has found since the engine was made."""

    checked: int = 0  # prompts
    # How many blocks differed by more than rounding explains, by the node that sent them.
    wrong: Counter[str] = dataclasses.field(default_factory=Counter)


class CanaryChecks:
    """An `IdleCheck`: chooses a share of the received prompts. Only the step thread uses it."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, share: float) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._share = share
        self.current: Canary | None = None  # the check that runs or waits for idle time
        self.findings = CanaryFindings()

    @property
    def lora(self) -> str | None:
        return self.current.lora if self.current is not None else None

    def received(self, request: Request) -> None:
        """One prompt is checked at a time. A newer prompt replaces one whose check has not begun, because the newer one's blocks stay
        cached for longer."""
        is_free = self.current is None or not self.current.has_begun
        if is_free and random.random() < self._share and Canary.can_check(self._scheduler, request):
            self.current = Canary(self._scheduler, self._runner, request, self.findings)

    def step(self) -> bool:
        if self.current is None:
            return False
        if self.current.step():
            self.current = None
        return True

    def stand_aside(self) -> None:
        if self.current is not None:
            self.current.stand_aside()


class Canary:
    """The check of one prompt."""

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner, request: Request, findings: CanaryFindings
    ) -> None:
        """`request` has the KV of its whole prompt on this node, received from a peer."""
        self._scheduler = scheduler
        self._runner = runner
        self._findings = findings
        self._request_id = request.request_id
        self._peer = request.transfer.peer if request.transfer is not None else None
        self._prompt = request.prompt_token_ids
        self._facts = RequestFacts(
            prompt_token_ids=self._prompt,
            sampling=_NOT_SAMPLED,
            cache_salt=request.cache_salt,
            lora=request.lora,
        )
        self._attempts = 0
        # The request that recomputes the prompt; None while the check holds no blocks.
        self._own: Request | None = None
        self._blocks: BlockIds = []
        self._computed = 0

    @staticmethod
    def can_check(scheduler: Scheduler, request: Request) -> bool:
        """Whether the canary can find the request's blocks again and can recompute their KV. It cannot for a prompt with images,
        because it has no rows for them."""
        hasher = scheduler.block_hasher
        return hasher is not None and request.num_prompt_tokens >= hasher.block_size and not request.media

    @property
    def lora(self) -> str | None:
        return self._facts.lora

    @property
    def has_begun(self) -> bool:
        return self._own is not None

    def step(self) -> bool:
        """Computes a few tokens, and compares after the last ones. Returns True when the check is over, also when it was given up
        for want of blocks or after too many interruptions. Call it only while the engine is idle."""
        if self._own is None and not self._begin():
            return True
        if self._computed < len(self._prompt):
            self._compute()
        if self._computed < len(self._prompt):
            return False
        self._compare()
        self.stand_aside()
        return True

    def stand_aside(self) -> None:
        """Gives the blocks back. The next `step` begins the prompt again."""
        if self._own is None:
            return
        forget = _empty_step()
        forget.finished_req_ids.add(REQUEST_ID)
        self._runner.start(forget).finish()
        self._scheduler.take_blocks_back(REQUEST_ID)
        self._own, self._blocks, self._computed = None, [], 0

    def _begin(self) -> bool:
        self._attempts += 1
        own = Request(
            REQUEST_ID,
            self._facts,
            # A prefix look-up leaves the last token out. With one token more it finds the whole prompt.
            output_token_ids=self._prompt[:1],
            block_hasher=self._scheduler.block_hasher,
        )
        blocks = self._scheduler.lend_blocks(own) if self._attempts <= ATTEMPTS else None
        if blocks is None:
            return False
        self._own, self._blocks, self._computed = own, blocks, 0
        return True

    def _compute(self) -> None:
        tokens = min(STEP_TOKENS, len(self._prompt) - self._computed)
        step = _empty_step()
        step.num_scheduled_tokens[REQUEST_ID] = step.total_num_scheduled_tokens = tokens
        if self._computed == 0:
            step.new_reqs.append(NewRequestData(REQUEST_ID, self._facts, self._prompt, self._blocks, 0))
        else:
            step.cached_reqs = CachedRequestData([REQUEST_ID], [self._computed], [None])
        self._runner.start(step).finish()
        self._computed += tokens

    def _compare(self) -> None:
        """Compares the recomputed blocks with the cached ones under the same hashes. Evicted blocks are left out."""
        if self._own is None:
            return
        cached, num_tokens = self._scheduler.find_prefix(self._own)
        if num_tokens == 0:
            return
        pairs = [
            (own, there)
            for table, hits in zip(self._blocks, cached, strict=True)
            for own, there in zip(table, hits, strict=False)
            if there != NULL_BLOCK_ID
        ]
        kept = str(self._runner.kv_cache.dtype).removeprefix("torch.")
        allowed = max(TOLERANCE[self._runner.info.dtype], TOLERANCE[kept])
        wrong = {there: off for own, there in pairs if not (off := self._difference(own, there)) <= allowed}
        self._findings.checked += 1
        if not wrong:
            return
        sender = self._peer.node_id if self._peer is not None else "a connector"
        self._findings.wrong[sender] += len(wrong)
        self._scheduler.convict(self._peer)
        logger.error(
            "the KV of %s, received from %s, is wrong in %d of %d blocks: computed here again it differs by up to %.2g of a block's "
            "norm, where %.2g is rounding. Nothing cached here so far is used again. Compare the two nodes' weights, devices and links.",
            self._request_id, sender, len(wrong), len(pairs), max(wrong.values()), allowed,
        )  # fmt: skip

    def _difference(self, own: int, there: int) -> float:
        """The norm of the difference of two blocks, divided by the norm of our own, in the layer where this is largest. NaN when a
        block holds NaN."""
        kv = self._runner.kv_cache
        ours, theirs = kv[own].float().flatten(1), kv[there].float().flatten(1)
        return float(((ours - theirs).norm(dim=1) / ours.norm(dim=1).clamp_min(1e-6)).max())


def _empty_step() -> SchedulerOutput:
    return SchedulerOutput(
        new_reqs=[],
        cached_reqs=CachedRequestData(),
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
        spec_token_ids={},
        finished_req_ids=set(),
        preempted_req_ids=set(),
    )
