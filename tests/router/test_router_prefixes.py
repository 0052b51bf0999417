from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.router.prefixes import MARKED_PLACES, PrefixRecord, PromptHashes


def block_hashes(tokens: list[int], size: int, salt: str | None) -> list[int]:
    return PromptHashes(tokens, salt).of(size)


def overlap(record: PrefixRecord, node_id: str, hashes: list[int]) -> int:
    """How many leading blocks the node likely has cached."""
    bit = record.bits.of(node_id)
    return next((blocks for blocks, nodes in record.levels(hashes) if nodes & bit), 0)


TOKENS = st.lists(st.integers(0, 3), max_size=40)


def common_blocks(left: list[int], right: list[int], size: int) -> int:
    count = 0
    while (count + 1) * size <= min(len(left), len(right)) and left[: (count + 1) * size] == right[
        : (count + 1) * size
    ]:
        count += 1
    return count


@given(sent=st.lists(TOKENS, max_size=4), prompt=TOKENS, size=st.sampled_from([1, 2, 4]))
def test_overlap_is_the_longest_common_prefix_as_far_as_it_is_marked(
    sent: list[list[int]], prompt: list[int], size: int
) -> None:
    record = PrefixRecord()
    for tokens in sent:
        record.sent("n", block_hashes(tokens, size, None))
    common = max((common_blocks(tokens, prompt, size) for tokens in sent), default=0)
    found = overlap(record, "n", block_hashes(prompt, size, None))
    assert found == max((place for place in MARKED_PLACES if place <= common), default=0)
    assert found >= common * 7 / 8


def test_nodes_and_salts_are_apart() -> None:
    record = PrefixRecord()
    record.sent("n", block_hashes([1, 2, 3, 4], 2, "salt"))
    assert overlap(record, "n", block_hashes([1, 2, 3, 4], 2, "salt")) == 2
    assert overlap(record, "n", block_hashes([1, 2, 3, 4], 2, None)) == 0
    assert overlap(record, "m", block_hashes([1, 2, 3, 4], 2, "salt")) == 0


def test_it_holds_as_much_as_the_node_and_forgets_the_longest_unused() -> None:
    record = PrefixRecord()
    record.set_capacity("n", 2)
    first, second = block_hashes([1, 1, 1], 1, None), block_hashes([2], 1, None)
    record.sent("n", first[:2])
    record.sent("n", second)
    assert overlap(record, "n", second) == 1
    assert overlap(record, "n", first) == 1  # of a prompt the last block goes first, as in a node's cache
    record.forget("n")
    assert overlap(record, "n", second) == 0


@given(prompt=TOKENS, output=TOKENS, size=st.sampled_from([1, 2, 4]))
def test_hashes_that_are_known_are_gone_on_from(prompt: list[int], output: list[int], size: int) -> None:
    hashes = PromptHashes(prompt, "salt")
    assert hashes.of(size) == block_hashes(prompt, size, "salt")
    assert hashes.with_output(size, output) == block_hashes(prompt + output, size, "salt")
