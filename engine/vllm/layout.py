"""vLLM's KV cache in our words: its groups of layers, its blocks as runs of bytes, and a request's block tables.

With blocks outermost all layers of a block lie side by side, whatever they keep: keys and values of one or of several shapes, latents,
or recurrent states. So a block is moved whole, and what lies where in it is vLLM's matter: two nodes pair only if their caches have
the same identity.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tandem.base.errors import ConfigurationError
from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.kvtransfer.base import KVCacheMemory

if TYPE_CHECKING:
    import torch

# Kinds of layers whose blocks may be handed over: their tables are positional, as ours are.
_HANDED_OVER = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MambaSpec")
_ALONE = "serve it with nodes that do both (--aggregated N)"


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

    def memory(self, cache: torch.Tensor, model: str, vocab_size: int) -> KVCacheMemory:
        """`cache`: any layer's, all of which lie in one allocation. Raises ConfigurationError where blocks are not outermost."""
        import torch  # vLLM has loaded it

        blocks, stride = self.num_blocks, int(self._config.kv_cache_tensors[0].block_stride)
        if any(each.block_stride * blocks != each.size for each in self._config.kv_cache_tensors):
            raise ConfigurationError(
                "vLLM's KV cache does not keep the layers of a block side by side: set pools.POOL.env to {VLLM_KV_CACHE_LAYOUT: BLHNC}, "
                "or to BLNHC, whichever its attention takes"
            )
        if stride % self.block_size:
            raise ConfigurationError(f"vLLM's blocks of {stride} bytes hold {self.block_size} tokens: {_ALONE}")
        shape = (blocks, 1, 1, 1, self.block_size, stride // self.block_size)
        whole = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
        kept = hashlib.sha256(repr(self._config.kv_cache_groups).encode()).hexdigest()[:16]
        return KVCacheMemory(
            tensor=whole[: blocks * stride].view(shape),
            model=f"{model} {kept}",
            num_layers=self.num_layers,
            num_groups=len(self.groups),
            vocab_size=vocab_size,
            has_windows=any(group.window is not None for group in self.groups),
            state_blocks=self.groups[-1].blocks_per_request,
        )


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
