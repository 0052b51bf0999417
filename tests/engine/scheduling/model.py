"""A model runner without a model that knows the right content of every slot of the KV cache.

The KV of a token is a number made of everything that it depends on. Each step writes the KV of its tokens and reads what attention
would read. So it catches a block that was freed too early, cached too early, written by a peer too late, or found for the wrong tokens,
in the step that would have answered wrongly from it. The next token is a function of the tokens before it, so every request must get
the answer that it would get alone.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence

from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.scheduling.output import ModelOutput, SchedulerOutput
from tandem.wire.images import MediaFeature

VOCABULARY = 50
STATE = -1  # in place of an offset
WRONG = -99  # sampled from something misread: no request may ever be given it


def kv_chain(token_ids: Sequence[int], salt: object = None, media: Sequence[MediaFeature] = ()) -> list[int]:
    """The right content of the KV at each position."""
    value = zlib.crc32(repr(salt).encode())
    chain = []
    seen = {place: each.identifier for each in media for place in range(each.offset, each.offset + each.length)}
    for place, token in enumerate(token_ids):
        value = hash((value, token, seen[place])) if place in seen else hash((value, token))
        chain.append(value)
    return chain


def next_token(token_ids: Sequence[int]) -> int:
    return kv_chain(token_ids)[-1] % VOCABULARY


def alone(prompt: Sequence[int], max_tokens: int, stops: Sequence[int] = ()) -> list[int]:
    """The answer of a request that runs alone."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


@dataclasses.dataclass
class KnownRequest:
    """The runner's record of a request."""

    tokens: list[int]
    tables: list[list[int]]


class FakeModel:
    def __init__(self, groups: Sequence[KVCacheGroup]) -> None:
        self.groups = groups
        self.kv: dict[tuple[int, int], int] = {}  # (block, offset) -> content
        self.known: dict[str, KnownRequest] = {}
        # By request: its salt and adapter, which a real runner does not get
        self.salts: dict[str, object] = {}
        self.media: dict[str, Sequence[MediaFeature]] = {}  # by request
        self.encoded: dict[str, int] = {}  # the encoded parts of images
        self.propose: Callable[[str, list[int]], list[int]] = lambda request_id, tokens: []
        # With `tolerant` a wrong read is no error, but the token sampled from it is WRONG.
        self.tolerant = False
        self.misread: set[str] = set()

    def write(self, tables: Sequence[Sequence[int]], chain: Sequence[int], start: int, end: int) -> None:
        for group, table in zip(self.groups, tables, strict=True):
            if group.kind is AttentionKind.STATE:
                self._write_state(table, chain[end - 1] if end > start else None)
                continue
            for position in range(start, end):
                block = table[position // group.block_size]
                if block:
                    self.kv[block, position % group.block_size] = chain[position]

    def read(self, who: str, tables: Sequence[Sequence[int]], chain: Sequence[int], first: int, end: int) -> None:
        """Checks all KV that the tokens from `first` to `end` attend to."""
        for group, table in zip(self.groups, tables, strict=True):
            if group.kind is AttentionKind.STATE:
                continue  # it was read before this step wrote another
            start = 0
            if group.kind is AttentionKind.SLIDING:
                assert group.window is not None
                start = max(first - group.window + 1, 0)
            for position in range(start, end):
                block = table[position // group.block_size]
                assert block, f"{who}: token {position} is read from the null block"
                found = self.kv.get((block, position % group.block_size))
                assert found == chain[position], f"{who}: token {position} in block {block} is not its own"

    def _write_state(self, table: Sequence[int], content: int | None) -> None:
        for block in table if content is not None else ():
            self.kv[block, STATE] = content

    def state_is(self, tables: Sequence[Sequence[int]], content: int) -> bool:
        """Whether all state blocks of a request hold the state after exactly these tokens."""
        return all(
            self.kv.get((block, STATE)) == content
            for group, table in zip(self.groups, tables, strict=True)
            for block in table
            if group.kind is AttentionKind.STATE
        )

    def _encode(self, step: SchedulerOutput) -> None:
        for identifier in step.forgotten_media:
            del self.encoded[identifier]
        for one in step.encoder_inputs:
            assert one.identifier not in self.encoded
            self.encoded[one.identifier] = one.length

    def _look(self, request_id: str, start: int, end: int) -> None:
        for each in self.media.get(request_id, ()):
            if each.offset < end and each.offset + each.length > start:
                assert self.encoded[each.identifier] == each.length

    def chain(self, request_id: str, token_ids: Sequence[int]) -> list[int]:
        return kv_chain(token_ids, self.salts.get(request_id), self.media.get(request_id, ()))

    def execute(self, step: SchedulerOutput) -> ModelOutput:
        self._update(step)
        self._encode(step)
        for source, target in step.state_copies:
            self.kv[target, STATE] = self.kv.get((source, STATE), WRONG)
        computed = {request.req_id: request.num_computed_tokens for request in step.new_reqs}
        computed.update(zip(step.cached_reqs.req_ids, step.cached_reqs.num_computed_tokens, strict=True))
        assert computed.keys() == step.num_scheduled_tokens.keys()
        chains = {}
        stale: set[str] = set()
        # Write the whole step before reading any of it, as a layer of a real forward pass does.
        for request_id, count in step.num_scheduled_tokens.items():
            known = self.known[request_id]
            tokens = known.tokens + step.spec_token_ids.get(request_id, [])
            assert 0 < count <= len(tokens) - computed[request_id]
            chains[request_id] = self.chain(request_id, tokens)
            start = computed[request_id]
            self._look(request_id, start, start + count)
            # A state continues from the previous token; at the first token it begins from zero, whatever the blocks hold.
            if start and not self.state_is(known.tables, chains[request_id][start - 1]):
                assert self.tolerant, f"{request_id}: its state is not that of token {start - 1}"
                stale.add(request_id)
            for group, table in zip(self.groups, known.tables, strict=True):
                if group.kind is AttentionKind.STATE:
                    assert len(table) == group.blocks_per_request
                    # A state cannot go back, so it is saved after the last token that is not a draft.
                    last = start + count - len(step.spec_token_ids.get(request_id, ())) - 1
                    self._write_state(table, -1 if request_id in stale else chains[request_id][last])
                    continue
                for position in range(start, start + count):
                    block = table[position // group.block_size]
                    assert block, f"{request_id}: token {position} is written to the null block"
                    self.kv[block, position % group.block_size] = chains[request_id][position]
        self._read_all(step, computed, chains, stale)
        output = ModelOutput({})
        for request_id, count in step.num_scheduled_tokens.items():
            known = self.known[request_id]
            start = computed[request_id]
            if start + count >= len(known.tokens):
                self._sample(request_id, known, step.spec_token_ids.get(request_id, []), output)
        return output

    def _read_all(
        self, step: SchedulerOutput, computed: dict[str, int], chains: dict[str, list[int]], stale: set[str]
    ) -> None:
        """Reads for all requests. A request that reads wrong KV computes wrong KV, which others may read in the same step."""
        self.misread = set(stale)
        for request_id in stale:
            start = computed[request_id]
            end = start + step.num_scheduled_tokens[request_id]
            self.write(self.known[request_id].tables, [-1] * end, start, end)
        while True:
            before = len(self.misread)
            for request_id, count in step.num_scheduled_tokens.items():
                if request_id in self.misread:
                    continue
                tables, start = self.known[request_id].tables, computed[request_id]
                try:
                    self.read(request_id, tables, chains[request_id], start, start + count)
                except AssertionError:
                    if not self.tolerant:
                        raise
                    self.misread.add(request_id)
                    self.write(tables, [-1] * (start + count), start, start + count)
            if len(self.misread) == before:
                return

    def _sample(self, request_id: str, known: KnownRequest, drafts: list[int], output: ModelOutput) -> None:
        sampled = [WRONG if request_id in self.misread else next_token(known.tokens)]
        for draft in drafts:
            if draft != sampled[-1]:
                break
            sampled.append(next_token(known.tokens + sampled))
        known.tokens += sampled
        output.sampled_token_ids[request_id] = sampled
        if proposal := self.propose(request_id, known.tokens):
            output.draft_token_ids[request_id] = proposal

    def _update(self, step: SchedulerOutput) -> None:
        for request_id in step.finished_req_ids | step.preempted_req_ids:
            self.known.pop(request_id, None)
        for new in step.new_reqs:
            assert new.req_id not in self.known
            tables = [list(table) for table in new.block_ids]
            self.known[new.req_id] = KnownRequest(list(new.token_ids), tables)
            assert list(new.image_parts) == list(self.media.get(new.req_id, ()))
        cached = step.cached_reqs
        for request_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                assert blocks is not None
                assert request_id not in self.known
                tokens, tables = cached.resumed_token_ids[request_id], [list(table) for table in blocks]
                self.known[request_id] = KnownRequest(list(tokens), tables)
            elif blocks is not None:
                for table, new_blocks in zip(self.known[request_id].tables, blocks, strict=True):
                    table += new_blocks
        # A sliding window frees blocks without telling the runner, whose tables still name them.
