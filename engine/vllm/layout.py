"""vLLM's KV cache in our words: its groups of layers, its blocks as runs of bytes, and a request's block tables.

With blocks outermost all layers of a block lie side by side, whatever they keep: keys and values of one or of several shapes, latents,
or recurrent states. So a block is moved whole, and what lies where in it is vLLM's matter: two nodes pair only if their caches have
the same identity. Of several ranks each has a block of its own under the same number. Where the heads lie one after another in it, a node
may have other ranks than its peer; elsewhere each rank's block counts as one head.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tandem.base.errors import ConfigurationError
from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.kvtransfer.base import HeadShare, KVCacheMemory

if TYPE_CHECKING:
    import torch

# Kinds of layers whose blocks may be handed over: their tables are positional, as ours are.
_HANDED_OVER = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MambaSpec")
# Those that keep keys and values, head by head.
_OF_HEADS = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
_ALONE = "serve it with nodes that do both (--aggregated N)"


class RankOf(NamedTuple):
    """The rank whose cache it is. `heads`: those whose keys and values all ranks keep together, if each head's lie in one piece; 0: only
    vLLM knows what lies where."""

    rank: int = 0
    ranks: int = 1
    heads: int = 0

    @property
    def share(self) -> HeadShare:
        """If there are fewer heads than ranks, several have the same one, as vLLM splits them."""
        return HeadShare(self.rank * self.heads // self.ranks, max(1, self.heads // self.ranks), self.heads)


_ALL = RankOf()


class VllmCache:
    """`groups` are vLLM's, but all that keep recurrent states are one, the last."""

    def __init__(self, config: Any) -> None:
        """`config`: vLLM's KVCacheConfig."""
        self._config = config
        self._specs = [_spec_of(group) for group in config.kv_cache_groups]
        self._states = [i for i, spec in enumerate(self._specs) if hasattr(spec, "mamba_cache_mode")]
        self._tokens = [i for i in range(len(self._specs)) if i not in self._states]
        names = [name for group in config.kv_cache_groups for name in group.layer_names]
        numbers = {name: number for number, name in enumerate(names)}
        layers = [tuple(numbers[name] for name in group.layer_names) for group in config.kv_cache_groups]
        self.num_layers = len(names)
        self.num_blocks = int(config.num_blocks)
        self.groups = [_group(self._specs[i], layers[i]) for i in self._tokens]
        if self._states:
            kept = sum(1 + self._specs[i].num_speculative_blocks for i in self._states)
            layers_with_states = tuple(layer for i in self._states for layer in layers[i])
            size = self._specs[self._states[0]].block_size
            state = KVCacheGroup(AttentionKind.STATE, size, layers_with_states, blocks_per_request=kept)
            self.groups.append(state)

    @property
    def block_size(self) -> int:
        return self.groups[0].block_size if self.groups else 1

    def group_of(self, theirs: int) -> int:
        """The place in `groups` of the group that vLLM calls `theirs`."""
        return self._tokens.index(theirs) if theirs in self._tokens else len(self._tokens)

    def tables(self, block_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        tables = [list(block_ids[i]) for i in self._tokens]
        if self._states:
            tables.append([block for i in self._states for block in block_ids[i]])
        return tables

    def check(self) -> None:
        """Raises ConfigurationError for a cache whose blocks are not handed over."""
        others = {type(spec).__name__ for spec in self._specs} - set(_HANDED_OVER)
        if others:
            raise ConfigurationError(
                f"vLLM keeps this model's KV as {', '.join(sorted(others))}, which is not handed over: {_ALONE}"
            )
        sizes = {self._specs[i].block_size for i in self._tokens}
        if len(sizes) != 1:
            raise ConfigurationError(
                f"vLLM's blocks of this model hold {' or '.join(map(str, sorted(sizes))) or 'no'} tokens, and those of one size alone "
                f"are handed over: {_ALONE}"
            )
        if any(self._specs[i].mamba_cache_mode != "none" for i in self._states):
            raise ConfigurationError(
                "this model keeps recurrent states, and vLLM moves them from block to block where it caches prefixes: set "
                "cache.prefix_caching to false to hand them over, or " + _ALONE
            )

    def memory(self, cache: torch.Tensor | None, model: str, vocab_size: int, of: RankOf = _ALL) -> KVCacheMemory:
        """`cache`: any layer's; all layers lie in one allocation. None: the ranks are other processes, and this one describes what they
        keep together. Raises ConfigurationError where blocks are not outermost."""
        import torch  # vLLM has loaded it

        blocks, stride = self.num_blocks, int(self._config.kv_cache_tensors[0].block_stride)
        if any(each.block_stride * blocks != each.size for each in self._config.kv_cache_tensors):
            raise ConfigurationError(
                "vLLM's KV cache does not keep the layers of a block side by side: set pools.POOL.env to {VLLM_KV_CACHE_LAYOUT: BLHNC}, "
                "or to BLNHC, whichever its attention takes"
            )
        if stride % self.block_size:
            raise ConfigurationError(f"vLLM's blocks of {stride} bytes hold {self.block_size} tokens: {_ALONE}")
        groups = self._config.kv_cache_groups
        share, page, kept = HeadShare(of.rank, 1, of.ranks), stride, repr(groups)
        if self._is_by_head(cache, of):
            share, page = of.share, self._specs[0].page_size_bytes
            all_heads = [dataclasses.replace(spec, num_kv_heads=of.heads) for spec in self._specs]
            kept = repr([(group.layer_names, spec) for group, spec in zip(groups, all_heads, strict=True)])
        inside = (self.block_size, page // (share.count * self.block_size))
        if cache is None:
            tensor = torch.empty((blocks, stride // page, 1, share.total, *inside), dtype=torch.uint8, device="meta")
        else:
            whole = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
            tensor = whole[: blocks * stride].view(blocks, stride // page, 1, share.count, *inside)
        return KVCacheMemory(
            tensor=tensor,
            model=f"{model} {hashlib.sha256(kept.encode()).hexdigest()[:16]}",
            num_layers=self.num_layers,
            num_groups=len(self.groups),
            vocab_size=vocab_size,
            has_windows=any(group.window is not None for group in self.groups),
            state_blocks=self.groups[-1].blocks_per_request,
            heads=share if of.ranks > 1 and cache is not None else None,
        )

    def _is_by_head(self, cache: torch.Tensor | None, of: RankOf) -> bool:
        """Whether a block is nothing but layers of the same size, one after another, and each of them heads."""
        heads, groups = of.share.count, self._config.kv_cache_groups
        if not of.heads or self._config.kv_cache_layout != "BLHNC":
            return False
        if any(hasattr(group.kv_cache_spec, "kv_cache_specs") for group in groups):
            return False
        if any(type(spec).__name__ not in _OF_HEADS or spec.num_kv_heads != heads for spec in self._specs):
            return False
        sizes = {spec.page_size_bytes for spec in self._specs}
        if len(sizes) > 1 or self._config.kv_cache_tensors[0].block_stride % sizes.pop():
            return False
        return cache is None or tuple(cache.shape[:3]) == (self.num_blocks, heads, self.block_size)


def _spec_of(group: Any) -> Any:
    """What one of a group's layers keeps. The layers of a group may differ in shape, and in nothing else."""
    spec = group.kv_cache_spec
    return next(iter(getattr(spec, "kv_cache_specs", {"": spec}).values()))


def _group(spec: Any, layers: tuple[int, ...]) -> KVCacheGroup:
    # By their types, because full attention notes a window, too, where it keeps every token of a layer that has one.
    match type(spec).__name__:
        case "SlidingWindowSpec":
            return KVCacheGroup(AttentionKind.SLIDING, spec.block_size, layers, spec.sliding_window)
        case "ChunkedLocalAttentionSpec":
            return KVCacheGroup(AttentionKind.CHUNKED, spec.block_size, layers, spec.attention_chunk_size)
    return KVCacheGroup(AttentionKind.FULL, spec.block_size, layers)
