"""A canary for wrong KV: in idle time, the engine recomputes a small share of the prompts whose KV came from a peer, and
compares the two.

A checksum proves that the bytes arrived as they were sent. The canary checks that they were right: it finds a device that
computes wrongly, two nodes whose weights differ, and a block that was reused while it travelled. Where the same bits are required
(`model.exact`), one other bit is wrong; elsewhere, what rounding does not explain.

The canary runs between steps, a few tokens at a time, and only while the engine is idle. It gives its blocks back as soon as
a request arrives, and begins again later. The KV that it computes is never cached.
"""

from __future__ import annotations

import abc
import dataclasses
import logging
import random
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tandem.engine.core import Engine
from tandem.engine.request import Request
from tandem.engine.scheduling.output import BlockIds, CachedRequestData, NewRequestData, SchedulerOutput
from tandem.kvtransfer.base import NULL_BLOCK_ID
from tandem.node.status import copied
from tandem.node.wings import PartContext, ServicePart
from tandem.wire.requests import RequestFacts
from tandem.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from tandem.engine.cache.group_manager import KVCacheGroup
    from tandem.engine.model.runner import ModelRunner
    from tandem.engine.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

REQUEST_ID = "canary"
STEP_TOKENS = 128  # computed between two looks at the mailbox
ATTEMPTS = 20  # interrupted checks of one prompt before the canary gives the prompt up
# The largest difference that rounding explains, relative to a block's norm: the two nodes may sum in different orders.
TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 8e-2, "float8_e4m3fn": 0.15}
# Integers as wide as a number of the cache, by its bytes.
BITS = {2: torch.int16, 4: torch.int32}
_NOT_SAMPLED = SamplingParams(temperature=0.0, max_tokens=1)


@dataclasses.dataclass(slots=True)
class CanaryFindings:
    """What the canary has found since the engine was made."""

    checked: int = 0  # prompts
    # How many blocks differed by more than rounding explains, by the node that sent them.
    wrong: Counter[str] = dataclasses.field(default_factory=Counter)


class CanaryChecks:
    """An `IdleCheck`: chooses a share of the received prompts. Only the step thread uses it."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, share: float, *, exact: bool = False) -> None:
        """`exact`: all nodes compute the same bits, so any difference is wrong."""
        self._scheduler = scheduler
        self._runner = runner
        self._share = share
        self._difference = BitDifference() if exact else RoundingDifference(runner)
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
            self.current = Canary(self._scheduler, self._runner, request, self.findings, self._difference)

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
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        request: Request,
        findings: CanaryFindings,
        difference: Difference,
    ) -> None:
        """`request` has the KV of its whole prompt on this node, received from a peer."""
        self._scheduler = scheduler
        self._runner = runner
        self._findings = findings
        self._difference = difference
        self._request_id = request.request_id
        self._peer = request.transfer.peer if request.transfer is not None else None
        self._prompt = request.prompt_token_ids
        self._facts = RequestFacts(
            prompt_token_ids=self._prompt, sampling=_NOT_SAMPLED, cache_salt=request.cache_salt, lora=request.lora
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
            (group, index, own, there)
            for group, table, hits in zip(self._runner.info.groups, self._blocks, cached, strict=True)
            for index, (own, there) in enumerate(zip(table, hits, strict=False))
            if there != NULL_BLOCK_ID
        ]
        kv = self._runner.kv_cache
        wrong = [
            found
            for group, index, own, there in pairs
            if (found := self._difference.between(kv[own], kv[there], group, index)) is not None
        ]
        self._findings.checked += 1
        if not wrong:
            return
        sender = self._peer.node_id if self._peer is not None else "a connector"
        self._findings.wrong[sender] += len(wrong)
        self._scheduler.convict(self._peer)
        first, most = min(wrong, key=lambda found: found.place), max(found.amount for found in wrong)
        token, layer = first.place
        logger.error(
            "the KV of %s, received from %s, is wrong in %d of %d blocks, first in block %d (token %d) of layer %d: computed here again "
            "it differs by up to %.2g of %s. Nothing cached here so far is used again. Compare the two nodes' weights, devices "
            "and links.",
            self._request_id, sender, len(wrong), len(pairs), first.block, token, layer, most, self._difference.unit,
        )  # fmt: skip


class WrongBlock(NamedTuple):
    block: int  # its number in the prompt
    place: tuple[int, int]  # the token and the layer where it begins to be wrong
    amount: float  # in the unit of its Difference; NaN when a block holds NaN


class Difference(abc.ABC):
    """How two blocks with the KV of the same tokens are compared."""

    allowed: float
    unit: str  # as the end of "by 0.1 of ..."

    def between(self, own: torch.Tensor, there: torch.Tensor, group: KVCacheGroup, index: int) -> WrongBlock | None:
        """Compares the blocks number `index` of a prompt, each [slots, 2, KV heads, tokens, head size]. Returns None if `there` is right."""
        if not group.blocks_per_request:  # a group with fewer layers than others leaves slots unused
            own, there = own[: len(group.layers)], there[: len(group.layers)]
        off = self.off(own, there)
        wrong = (~(off <= self.allowed)).nonzero().tolist()
        if not wrong:
            return None
        slot, token = min(wrong, key=lambda place: (place[1], place[0]))
        layer = group.layers[0 if group.blocks_per_request else slot]
        return WrongBlock(index, (index * group.block_size + token, layer), float(off.max()))

    @abc.abstractmethod
    def off(self, own: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        """By how much they differ: [slots, tokens], or [slots, 1] for all tokens of a block together."""


class RoundingDifference(Difference):
    """The nodes may sum in different orders."""

    def __init__(self, runner: ModelRunner) -> None:
        kept = str(runner.kv_cache.dtype).removeprefix("torch.")
        self.allowed = max(TOLERANCE[runner.info.dtype], TOLERANCE[kept])
        self.unit = f"a block's norm, where {self.allowed:.2g} is rounding"

    def off(self, own: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        """The norm of the difference, divided by the norm of our own."""
        ours, theirs = own.float().flatten(1), there.float().flatten(1)
        share: torch.Tensor = (ours - theirs).norm(dim=1) / ours.norm(dim=1).clamp_min(1e-6)
        return share[:, None]


class BitDifference(Difference):
    """The nodes compute the same bits."""

    allowed = 0.0
    unit = "a token's numbers in a layer, where the same bits are required"

    def off(self, own: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        """The share of the numbers with other bits. A NaN is wrong as well."""
        bits = BITS[own.element_size()]
        other: torch.Tensor = (own.view(bits) != there.view(bits)) | own.isnan()
        return other.float().mean(dim=(1, 2, 4))


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


def make(context: PartContext) -> ServicePart | None:
    config, engine = context.config, context.engine
    if not isinstance(engine, Engine) or config.transfer is None:
        return None
    if not config.role.writes_answers or not config.transfer.canary_share:
        return None
    engine.idle_check = checks = CanaryChecks(
        engine.scheduler, engine.runner, config.transfer.canary_share, exact=config.engine.model.exact == "require"
    )
    return CanaryPart(checks.findings)


class CanaryPart(ServicePart):
    def __init__(self, findings: CanaryFindings) -> None:
        self._findings = findings

    def count(self, counters: dict[str, Any]) -> None:
        counters["kv_checks"] = self._findings.checked
        counters["wrong_kv"] = copied(Counter(counters["wrong_kv"]) + self._findings.wrong)
