"""What joins vLLM's two connectors, which `connector` has, to the halves of Tandem's: one object for each engine, in one process.

vLLM has no quarantine. So where a load has failed while a peer may still write to its blocks, vLLM hears of the failure only when
nothing can write to them any more; until then the request waits with them.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tandem.engine.request import Request
from tandem.engine.vllm.layout import RankOf, VllmCache
from tandem.engine.vllm.ranks import RanksDoor
from tandem.engine.wings import Connect
from tandem.kvtransfer.base import ConnectorMetadata, ConnectorOutput, LoadFailure, SchedulerConnector, WorkerConnector
from tandem.wire.images import MediaFeature
from tandem.wire.requests import CachePeers, KVTransferParams

if TYPE_CHECKING:
    import torch

HANDOVERS: dict[str, Handover] = {}
"""By the key that vLLM's configuration carries to its connectors, which it makes itself."""


class TransferView:
    """One of vLLM's requests, as a connector of ours may see it."""

    def __init__(self, ours: Request, theirs: Any) -> None:
        self._ours = ours
        self._theirs = theirs
        # Tokens that the request has found in the cache here; vLLM counts them as computed only after it has told its connector.
        self.num_found = 0

    @property
    def request_id(self) -> str:
        return self._ours.request_id

    @property
    def all_token_ids(self) -> Sequence[int]:
        tokens: Sequence[int] = self._theirs._all_token_ids
        return tokens

    @property
    def num_prompt_tokens(self) -> int:
        return self._ours.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_computed_tokens(self) -> int:
        return max(int(self._theirs.num_computed_tokens), self.num_found)

    @property
    def output_token_ids(self) -> Sequence[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def cache_salt(self) -> str | None:
        return self._ours.facts.cache_salt

    @property
    def lora(self) -> str | None:
        return self._ours.facts.lora

    @property
    def when_idle(self) -> bool:
        return self._ours.facts.when_idle

    @property
    def media(self) -> Sequence[MediaFeature]:
        return ()

    @property
    def transfer(self) -> KVTransferParams | None:
        return self._ours.transfer

    @property
    def block_hashes(self) -> Sequence[bytes]:
        return ()

    @property
    def cache_peers(self) -> CachePeers | None:
        return None

    @property
    def is_distrusted(self) -> bool:
        return False

    @property
    def skip_reading_prefix_cache(self) -> bool:
        return bool(self._theirs.skip_reading_prefix_cache)


class Handover:
    scheduler: SchedulerConnector
    worker: WorkerConnector
    layout: VllmCache

    def __init__(self, connect: Connect, ranks: int = 1, heads: int = 0) -> None:
        """`ranks`: more than one are other processes, which open their lines by this object's key. `heads`: see `RankOf`."""
        self.fails = connect.fails
        self._halves = connect.halves
        self._has_begun = False
        self.key = uuid.uuid4().hex
        self._of = RankOf(0, ranks, heads)
        self._door = RanksDoor(self.key, ranks) if ranks > 1 else None
        self.identity = ""  # of what lies in the cache's blocks: set before vLLM makes its cache
        self.vocab_size = 0
        self.views: dict[str, TransferView] = {}  # of requests that have not ended
        self._output = ConnectorOutput()
        # Requests whose load has failed, and the blocks to which a peer may still write.
        self._unsafe: dict[str, set[int]] = {}
        HANDOVERS[self.key] = self

    def begin(self, config: Any) -> None:
        """Makes the halves for a cache of this KVCacheConfig. vLLM's worker calls it, if it is in this process, and then its scheduler.
        Raises ConfigurationError for a cache that is not handed over."""
        if self._has_begun:
            return
        self.layout = VllmCache(config)
        self.layout.check()
        lines = self._door.lines() if self._door is not None else ()
        self.scheduler, self.worker = self._halves(self.layout.groups, lines)
        self._has_begun = True
        if self.has_ranks:
            self.register(None)

    @property
    def has_ranks(self) -> bool:
        """Whether vLLM computes in other processes."""
        return self._door is not None

    @property
    def told(self) -> dict[str, Any]:
        """What vLLM's configuration carries to its connectors, wherever they are."""
        return {"handover": self.key, "ranks": self._of.ranks, "heads": self._of.heads}

    def register(self, cache: torch.Tensor | None) -> None:
        """None: the ranks have registered theirs."""
        self.worker.register_kv_caches(self.layout.memory(cache, self.identity, self.vocab_size, self._of))

    def start_step(self, plan: ConnectorMetadata) -> None:
        self.worker.bind_connector_metadata(plan)
        self.worker.handle_preemptions()
        self.worker.start_load_kv()

    def save(self) -> None:
        self.worker.wait_for_save()

    def collect(self, finished_req_ids: set[str]) -> tuple[set[str], set[str], set[str]]:
        """What vLLM may hear now: requests that are sent, received, and failed. Called once in each step."""
        self._output = output = self.worker.get_finished(finished_req_ids)
        for request_id in [each for each in output.finished_recving if not self._is_whole(each, output)]:
            handoff = output.finished_recving.pop(request_id)
            why = f"KV for {handoff.num_tokens} tokens came where others were asked for"
            output.failed_recving[request_id] = LoadFailure(why)
        self.scheduler.update_connector_output(output)
        failed = set()
        for request_id, failure in output.failed_recving.items():
            if failure.unsafe_blocks:
                self._unsafe[request_id] = set(failure.unsafe_blocks)
            else:
                failed.add(request_id)
        for request_id, blocks in list(self._unsafe.items()):
            blocks -= output.released_blocks
            if not blocks:
                del self._unsafe[request_id]
                failed.add(request_id)
        return set(output.finished_sending), set(output.finished_recving) | failed, failed

    def _is_whole(self, request_id: str, output: ConnectorOutput) -> bool:
        view, handoff = self.views.get(request_id), output.finished_recving[request_id]
        return view is None or (handoff.num_tokens == view.num_tokens and handoff.first_token is not None)

    def take(self) -> ConnectorOutput:
        output, self._output = self._output, ConnectorOutput()
        return output

    @property
    def quarantined(self) -> int:
        return sum(map(len, self._unsafe.values()))

    def close(self) -> None:
        HANDOVERS.pop(self.key, None)
        if self._door is not None:
            self._door.close()
        if self._has_begun:
            self.worker.shutdown()
