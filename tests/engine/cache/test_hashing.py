"""Two blocks have the same hash if and only if their KV is the same."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

import cbor2
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tandem.base.errors import InvalidRequest
from tandem.engine.cache.hashing import BlockHasher, extra_keys, make_block_hasher
from tandem.engine.config import HashAlgorithm
from tandem.kvtransfer.protocol.halves import token_hash
from tandem.router.prefixes import PromptHashes
from tandem.wire.adapters import identity_of
from tandem.wire.block_hashes import block_hashes, root_hash
from tandem.wire.images import MediaFeature
from tandem.wire.sampling import SamplingParams
from tests.engine.made_requests import made_request

ALGORITHMS = list(HashAlgorithm)


def chain(tokens: Iterable[int], hasher: BlockHasher | None = None, **fields: object) -> list[bytes]:
    hasher = hasher or make_block_hasher(HashAlgorithm.SHA256, 4, "seed")
    return made_request("a", tokens, SamplingParams(), block_hasher=hasher, **fields).block_hashes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_full_block_has_a_hash_that_stands_for_everything_before_it(algorithm):
    hasher = make_block_hasher(algorithm, 4, "seed")
    assert [len(chain(range(n), hasher)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    one, other = chain([0, *range(1, 12)], hasher), chain([9, *range(1, 12)], hasher)
    assert all(a != b for a, b in zip(one, other, strict=True))
    assert chain(range(12), hasher)[:2] == chain([*range(8), 99, 99, 99, 99], hasher)[:2]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_seed_makes_hashes_agree_and_its_absence_makes_them_differ(algorithm):
    hashers = [make_block_hasher(algorithm, 4, seed) for seed in ("x", "x", "y", None, None)]
    assert chain(range(8), hashers[0]) == chain(range(8), hashers[1])
    assert len({hasher.root for hasher in hashers}) == 4


def test_the_binary_layout_is_the_documented_one():
    root = hashlib.sha256(b"seed").digest()
    first = hashlib.sha256(root + struct.pack("<4I", 1, 2, 3, 70000)).digest()
    salt = struct.pack("<I", 4) + b"salt" + struct.pack("<QQ", 1, 0) + b"s"
    assert chain([1, 2, 3, 70000]) == [first]
    assert chain([1, 2, 3, 70000], cache_salt="s") == [
        hashlib.sha256(root + struct.pack("<4I", 1, 2, 3, 70000) + salt).digest()
    ]


def test_the_cbor_layout_can_be_made_by_anybody():
    """In the canonical form of RFC 8949, 4.2.1: another would hash every block differently from the nodes and tiers that have it."""
    assert cbor2.dumps([b"\x01", [1, 70000], None], canonical=True).hex() == "83410182011a00011170f6"
    hasher = make_block_hasher(HashAlgorithm.SHA256_CBOR, 4, "seed")
    root = hashlib.sha256(bytes.fromhex("6473656564")).digest()
    first = hashlib.sha256(cbor2.dumps([root, [1, 2, 3, 4], None], canonical=True)).digest()
    second = hashlib.sha256(cbor2.dumps([first, [5, 6, 7, 8], None], canonical=True)).digest()
    assert chain(range(1, 9), hasher) == [first, second]
    fast = make_block_hasher(HashAlgorithm.XXHASH_CBOR, 4, "seed")
    assert chain(range(1, 5), fast) == [
        xxhash.xxh3_128_digest(cbor2.dumps([fast.root, [1, 2, 3, 4], None], canonical=True))
    ]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_kind_of_key_tells_blocks_apart(algorithm):
    hasher = make_block_hasher(algorithm, 4, "seed")
    variants = [
        {}, {"lora": "x"}, {"cache_salt": "x"}, {"lora": "y"}, {"lora": "x", "cache_salt": "x"},
        {"media": [MediaFeature("x", 0, 2)]}, {"media": [MediaFeature("x", 1, 2)]},
        {"media": [MediaFeature("y", 0, 2)]}, {"media": [MediaFeature("x", 0, 1), MediaFeature("x", 1, 2)]}
    ]  # fmt: skip
    assert len({chain(range(4), hasher, **fields)[0] for fields in variants}) == len(variants)


def test_the_salt_is_in_the_first_block_only_and_carried_on_by_the_chain():
    request = made_request("a", range(12), cache_salt="s", lora="l")
    assert extra_keys(request, 0, 4) == (("lora", b"l"), ("salt", b"s"))
    assert extra_keys(request, 4, 8) == (("lora", b"l"),)
    salted, plain = chain(range(12), cache_salt="s"), chain(range(12))
    assert not set(salted) & set(plain)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(0, 40), st.sampled_from(ALGORITHMS))
def test_a_chain_grown_in_parts_is_the_chain(tokens, cut, algorithm):
    hasher = make_block_hasher(algorithm, 4, "seed")
    whole: list[bytes] = []
    hasher.extend(whole, made_request("a", tokens, cache_salt="s"))
    parts: list[bytes] = []
    hasher.extend(parts, made_request("a", tokens[:cut], cache_salt="s"))
    hasher.extend(parts, made_request("a", tokens, cache_salt="s"))
    assert parts == whole


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("token", [-1, 2**32, 0.5, "1"])
def test_what_is_no_token_is_refused(algorithm, token):
    with pytest.raises(InvalidRequest):
        chain([1, 2, 3, token], make_block_hasher(algorithm, 4, "seed"))


IDENTITIES = st.none() | st.builds(identity_of, st.text(), st.text("0123456789abcdef", min_size=32, max_size=32))


@given(
    st.lists(st.integers(0, 9), min_size=8, max_size=12),
    st.tuples(IDENTITIES, st.none() | st.text()),
    st.tuples(IDENTITIES, st.none() | st.text()),
    st.sampled_from(ALGORITHMS),
)
def test_kv_of_different_adapters_never_has_one_name(tokens, one, other, algorithm):
    """This holds in a node's cache and tiers, in the routers' index, and between the two nodes of a transfer."""
    hasher = make_block_hasher(algorithm, 4, "s")
    chains = [set(chain(tokens, hasher, lora=lora, cache_salt=salt)) for lora, salt in (one, other)]
    routed = [block_hashes(tokens, 4, root_hash(salt, lora)) for lora, salt in (one, other)]
    handed = [token_hash(tokens, salt, lora) for lora, salt in (one, other)]
    if one == other:
        assert chains[0] == chains[1]
        assert routed[0] == routed[1]
        assert handed[0] == handed[1]
    else:
        assert not chains[0] & chains[1]
        assert not set(routed[0]) & set(routed[1])
        assert handed[0] != handed[1]


@st.composite
def prompts_with_images(draw):
    """Tokens, and the runs of some images among them."""
    media, at = [], draw(st.integers(0, 6))
    for place in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 9))
        media.append(MediaFeature(f"{place}", at, length))
        at += length + draw(st.integers(0, 6))
    return [1] * (at + draw(st.integers(0, 12))), media


@given(prompts_with_images(), st.data(), st.sampled_from(ALGORITHMS))
def test_equal_placeholders_of_different_images_share_no_block(prompt, data, algorithm):
    tokens, media = prompt
    hasher = make_block_hasher(algorithm, 4, "seed")
    place = data.draw(st.integers(0, len(media) - 1))
    other = [*media]
    other[place] = MediaFeature("other", media[place].offset, media[place].length)
    ours, theirs = (chain(tokens, hasher, media=each) for each in (media, other))
    first = media[place].offset // 4
    assert ours[:first] == theirs[:first]
    assert not set(ours[first:]) & set(theirs[first:])
    # Routers tell them apart in the same places.
    ours, theirs = (PromptHashes(tokens, None, None, each).of(4) for each in (media, other))
    assert ours[:first] == theirs[:first]
    assert not set(ours[first:]) & set(theirs[first:])
