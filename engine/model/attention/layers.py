"""Describes each attention layer, as found by probing the model, and the plan of the cache tensor that all layers share."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

import msgspec

from tandem.base.errors import InternalError
from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.kvtransfer.base import LayerShare

if TYPE_CHECKING:
    import torch


_NOWHERE = 1 << 30  # the slot of a layer that another stage has; no tensor has it


class AttentionLayer(msgspec.Struct, frozen=True):
    """One layer's attention, as the model calls it."""

    index: int
    num_query_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None  # in tokens, with the one that attends
    chunked: bool = False  # a token reads only back to the last multiple of `window`
    reads_of: int | None = None  # the layer whose keys and values it reads; it keeps none itself
    # The sizes of the latent and of the rotary part that it keeps side by side instead of keys and values.
    latent: tuple[int, int] | None = None
    expanded: tuple[int, int] = (0, 0)  # with latents: the sizes of a head's keys and values
    # If several ranks keep their heads in one cache: the heads of all ranks, and the first one of this rank.
    heads_in_cache: int = 0  # 0: only this rank's
    first_head: int = 0
    own: bool = False  # it attends by its own code: see tandem.engine.model.own_attention
    scale: float | None = None  # of the scores; None if unknown
    softcap: float | None = None
    sinks: bool = False


class KeptStates(Protocol):
    """The recurrent states of a request."""

    @property
    def layers(self) -> tuple[int, ...]: ...
    @property
    def num_bytes(self) -> int: ...
    def blocks_for(self, block_bytes: int) -> int: ...


class CachePlan(msgspec.Struct, frozen=True):
    """How all layers share the tensor [num_blocks, slots, num_parts, num_kv_heads, block_size, head_dim].

    There are two parts, keys and values, or one part with latents. Layers with fewer or smaller heads than the largest use the leading
    ones.
    """

    groups: tuple[KVCacheGroup, ...]  # the groups of layers that attend
    slots: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    group_of_layer: tuple[int, ...]
    slot_of_layer: tuple[int, ...]
    states: KVCacheGroup | None = None  # the group of layers that keep a recurrent state
    num_parts: int = 2
    readers: frozenset[int] = frozenset()  # layers that read another layer's keys and values
    first_head_of_layer: tuple[int, ...] = ()  # this rank's first head in each layer

    @property
    def all_groups(self) -> tuple[KVCacheGroup, ...]:
        """The groups in the order of the scheduler and of a batch's block tables: states come last."""
        return self.groups if self.states is None else (*self.groups, self.states)

    @property
    def state_blocks(self) -> int:
        """How many blocks of recurrent states each request has."""
        return 0 if self.states is None else self.states.blocks_per_request

    @property
    def elements_per_block(self) -> int:
        return self.slots * self.num_parts * self.num_kv_heads * self.block_size * self.head_dim

    def share_of(self, layers: Collection[int]) -> LayerShare:
        """The slots of a pipeline stage's layers, which are consecutive in each group."""
        ranges = []
        for group in self.groups:
            slots = [slot for slot, layer in enumerate(group.layers) if layer in layers]
            first = slots[0] if slots else 0
            if slots != list(range(first, first + len(slots))):
                raise InternalError(
                    f"a stage has layers {sorted(layers)}, which do not follow one another in {group.layers}"
                )
            ranges.append((first, len(slots)))
        return LayerShare(tuple(ranges), self.slots)

    def of_share(self, share: LayerShare) -> CachePlan:
        """The plan of blocks that have only this share's layers, with the same groups."""
        return msgspec.structs.replace(
            self,
            slots=share.slots,
            slot_of_layer=tuple(
                slot - first if first <= slot < first + count else _NOWHERE
                for slot, group in zip(self.slot_of_layer, self.group_of_layer, strict=True)
                for first, count in (share.of_group[group],)
            ),
        )

    def shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        return (num_blocks, self.slots, self.num_parts, self.num_kv_heads, self.block_size, self.head_dim)

    def blocks_for(self, num_tokens: int, tokens_per_step: int) -> int:
        """The most blocks that one sequence of this length holds at once, if a step computes at most `tokens_per_step` of its tokens."""
        total = self.state_blocks
        for group in self.groups:
            held = num_tokens
            if group.window is not None:
                # One more block, because a window rarely begins at a block's edge.
                held = min(num_tokens, group.window - 1 + tokens_per_step + group.block_size)
            total += -(-held // group.block_size)
        return total


def plan_cache(
    layers: tuple[AttentionLayer, ...],
    block_size: int,
    states: KeptStates | None = None,
    dtype: torch.dtype | None = None,  # of the cache; only with states
) -> CachePlan:
    """Groups the layers so that every group has the same number of slots and little memory is wasted.

    A block has the same size in each group, so a group with fewer layers than slots wastes the rest. If the kinds of layers differ much
    in number (say 5 sliding for 1 full), the larger kind is split into several groups of the smaller one's size, if that wastes less.
    """
    if states is not None and dtype is not None and states.num_bytes:
        return _with_states(plan_cache(layers, block_size) if layers else None, block_size, states, dtype)
    kinds: dict[tuple[int | None, bool], list[int]] = {}
    for layer in layers:
        if layer.reads_of is None:
            kinds.setdefault((layer.window, layer.chunked), []).append(layer.index)
    counts = [len(members) for members in kinds.values()]

    def slots_in_use(slots: int) -> int:
        return sum(-(-count // slots) for count in counts) * slots

    # Of equally good sizes the larger one is chosen, because every group is one more block table to keep.
    slots = min(counts, key=lambda count: (slots_in_use(count), -count))
    groups: list[KVCacheGroup] = []
    end = 1 + max(layer.index for layer in layers)
    group_of, slot_of = [0] * end, [0] * end
    first_heads = [0] * end
    for layer in layers:
        first_heads[layer.index] = layer.first_head
    # Full attention goes first: its groups decide how much of a prefix is cached at all.
    for (window, chunked), members in sorted(
        kinds.items(), key=lambda item: (item[0][0] is not None, item[0][0] or 0, item[0][1])
    ):
        kind = AttentionKind.FULL if window is None else AttentionKind.SLIDING
        if chunked:
            kind = AttentionKind.CHUNKED
        # Each group has layers of all depths, in order, so that a pipeline stage has about the same share of every group.
        pieces = -(-len(members) // slots)
        for first in range(pieces):
            part = members[first::pieces]
            for slot, index in enumerate(part):
                group_of[index], slot_of[index] = len(groups), slot
            groups.append(KVCacheGroup(kind=kind, block_size=block_size, layers=tuple(part), window=window))
    for layer in layers:
        if layer.reads_of is not None:
            group_of[layer.index], slot_of[layer.index] = group_of[layer.reads_of], slot_of[layer.reads_of]
    return CachePlan(
        groups=tuple(groups),
        slots=slots,
        num_kv_heads=max(layer.heads_in_cache or layer.num_kv_heads for layer in layers),
        head_dim=max(max(layer.key_dim, layer.value_dim) for layer in layers),
        block_size=block_size,
        group_of_layer=tuple(group_of),
        slot_of_layer=tuple(slot_of),
        num_parts=1 if any(layer.latent for layer in layers) else 2,
        readers=frozenset(layer.index for layer in layers if layer.reads_of is not None),
        first_head_of_layer=tuple(first_heads),
    )


def _with_states(plan: CachePlan | None, block_size: int, states: KeptStates, dtype: torch.dtype) -> CachePlan:
    """The plan of a model without attention: a block holds one request's states."""
    if plan is None:
        plan = CachePlan(
            groups=(),
            slots=1,
            num_kv_heads=1,
            head_dim=-(-states.num_bytes // (2 * block_size * dtype.itemsize)),
            block_size=block_size,
            group_of_layer=(),
            slot_of_layer=(),
        )
    group = KVCacheGroup(
        kind=AttentionKind.STATE,
        block_size=block_size,
        layers=states.layers,
        blocks_per_request=states.blocks_for(plan.elements_per_block * dtype.itemsize),
    )
    return msgspec.structs.replace(plan, states=group)
