"""Builders for block tables."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.engine.cache.group_manager import AttentionKind, KVCacheGroup
from tandem.engine.cache.hashing import make_block_hasher
from tandem.engine.cache.manager import KVCacheManager
from tandem.engine.config import HashAlgorithm
from tandem.engine.request import Request
from tandem.wire.sampling import SamplingParams
from tests.engine.made_requests import made_request

BLOCK = 4
FULL = KVCacheGroup(AttentionKind.FULL, BLOCK, (0,))
STATES = KVCacheGroup(AttentionKind.STATE, BLOCK, (1,), blocks_per_request=3)
HASHER = make_block_hasher(HashAlgorithm.SHA256, BLOCK, "seed")


def sliding(window: int, block_size: int = BLOCK) -> KVCacheGroup:
    return KVCacheGroup(AttentionKind.SLIDING, block_size, (1,), window)


def manager(*groups: KVCacheGroup, num_blocks: int = 50, **options: object) -> KVCacheManager:
    settings: dict[str, object] = {"caching": True, "max_model_len": 1000, "max_new_tokens": 64}
    return KVCacheManager(groups or (FULL,), num_blocks, **{**settings, **options})  # type: ignore[arg-type]


def request(name: str, tokens: Iterable[int], **fields: object) -> Request:
    return made_request(name, tokens, SamplingParams(max_tokens=99), block_hasher=HASHER, **fields)


def admit(cache: KVCacheManager, each: Request, num_new: int | None = None) -> int | None:
    """Admits a request as the scheduler does, and computes `num_new` of its tokens, all by default. Returns how
    many were found; None when there was no room."""
    hits, num_hit = cache.find_prefix(each)
    left = each.num_tokens - num_hit
    count = left if num_new is None else min(num_new, left)
    if cache.allocate_slots(each, count, hits=hits, num_hit_tokens=num_hit) is None:
        return None
    each.num_computed_tokens = num_hit + count
    return num_hit


def decode(cache: KVCacheManager, each: Request, *tokens: int) -> None:
    """Samples each token and computes the one before it."""
    for token in tokens:
        each.append_output_token(token)
        assert cache.extend_slots(each, 1) is not None
        each.num_computed_tokens += 1


def check(cache: KVCacheManager, *owners: Request) -> None:
    cache.check_integrity({each.request_id: each for each in owners})
