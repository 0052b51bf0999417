"""The tier in an object store, with SeaweedFS: what nodes that never met find, and that nothing damaged or distrusted is read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

from tandem.base.errors import ConfigurationError
from tandem.kvtransfer.base import KVCacheMemory
from tandem.kvtransfer.config import TierConfig
from tandem.kvtransfer.objects import eras, inquiries
from tandem.kvtransfer.objects.tier import ObjectTier
from tandem.kvtransfer.offload.cpu import Copier, CopyThread, TierSurroundings
from tandem.kvtransfer.offload.patience import FIRST_OUT_S
from tandem.kvtransfer.offload.spec import Copy, Tier
from tests.clock import Clock
from tests.kvtransfer.objects.seaweed import SeaweedStore
from tests.kvtransfer.offload.kv_tiers import PATIENCE_S, ended
from tests.waiting import until

CHAIN = [bytes([n]) * 32 for n in range(1, 9)]
NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def _quick_eras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eras, "QUIET_S", 0.0)
    monkeypatch.setattr(inquiries, "LOOK_S", 0.1)
    monkeypatch.setattr(inquiries, "ANSWER_S", PATIENCE_S)  # the machine may be busy


class StoreNode:
    """A tier of a node, and its device's cache. Each has the same model."""

    def __init__(self, url: str, seaweed: SeaweedStore, factor: int = 1, model: str = "m") -> None:
        self.cache = KVCacheMemory(torch.rand(32, 2, 2, 3, 4, 8), model, 2, 1, 100)
        self.clock = Clock()
        self.url = url
        options = {"url": url, "credentials": str(seaweed.credentials)}
        config = TierConfig(spec="objects", options=options, block_factor=factor)
        self.tier = Tier(ObjectTier(config, TierSurroundings(self._thread)), factor)
        self.tier.open(self.cache, lambda: None)
        self.resets = 0

    def _thread(self, copier: Copier, wake: Callable[[], None], name: str) -> CopyThread:
        return CopyThread(copier, wake, name, self.clock)

    def _job(self, keys: list[bytes], blocks: list[int], within_s: float) -> Copy:
        places = list(range(len(keys) * self.tier.block_factor))
        return Copy(next(NUMBERS), blocks, places, keys, self.resets, within_s)

    def store(self, keys: list[bytes], blocks: list[int]) -> bool | None:
        room = self.tier.manager.prepare_store(keys)
        assert room is not None
        assert room.keys == keys
        job = self._job(keys, blocks, PATIENCE_S)
        self.tier.mover.submit([job], [])
        written = ended(self.tier.mover, job.job)[job.job]
        self.tier.manager.complete_store(room, written=bool(written))
        return written

    def load(self, keys: list[bytes], blocks: list[int], within_s: float = PATIENCE_S) -> bool | None:
        job = self._job(keys, blocks, within_s)
        self.tier.mover.submit([], [job])
        right = ended(self.tier.mover, job.job)[job.job]
        if right is False:
            self.tier.manager.lost(keys)
        return right

    def finds(self, keys: list[bytes]) -> int:
        """How many of these it has, once it has asked."""
        manager = self.tier.manager
        if manager.find_out(keys, compute_s=100.0):
            until(lambda: not manager.is_finding_out(keys[-1]))
        return manager.lookup(keys)

    def reset(self) -> None:
        self.resets += 1
        self.tier.manager.reset()
        assert self.tier.recall is None
        until(lambda: not self.thread.has_first)

    @property
    def thread(self) -> CopyThread:
        assert isinstance(self.tier.mover, CopyThread)
        return self.tier.mover

    def close(self) -> None:
        self.tier.close()


Start = Callable[..., StoreNode]


@pytest.fixture
def start(seaweed: SeaweedStore) -> Iterator[Start]:
    """Starts nodes that share a folder of this test alone."""
    url = f"{seaweed.bucket('kvcache')}/{next(NUMBERS)}"
    begun: list[StoreNode] = []

    def start_one(folder: str = "kv", **given: int | str) -> StoreNode:
        begun.append(StoreNode(f"{url}/{folder}", seaweed, **given))  # type: ignore[arg-type]
        return begun[-1]

    yield start_one
    seaweed.go_on()
    for node in begun:
        node.close()


def test_a_node_that_never_met_the_other_finds_how_much_it_left(start: Start) -> None:
    first, second = start(factor=2), start(factor=2)
    assert second.finds(CHAIN) == 0
    assert first.store(CHAIN[:5], list(range(1, 11)))
    assert [second.finds(CHAIN[:length]) for length in (8, 5, 1, 3)] == [5, 5, 1, 3]
    assert second.load(CHAIN[1:3], [20, 21, 22, 23])
    assert (second.cache.tensor[20:24] == first.cache.tensor[3:7]).all()
    assert start(factor=2, model="another").finds(CHAIN) == 0
    assert start(factor=2, folder="elsewhere").finds(CHAIN) == 0
    assert start(factor=1).finds(CHAIN) == 0


def test_what_is_there_is_not_stored_again(start: Start) -> None:
    first, second, third = start(), start(), start()
    assert first.store(CHAIN[:1], [1])
    assert second.store(CHAIN[:1], [2]), "another content, so that the test sees which of them is there"
    assert third.load(CHAIN[:1], [3])
    assert (third.cache.tensor[3] == first.cache.tensor[1]).all()


def test_a_damaged_object_is_computed_again_and_then_replaced(start: Start, seaweed: SeaweedStore) -> None:
    first, second = start(), start()
    assert first.store(CHAIN[:2], [1, 2])
    folder = first.url.partition("kvcache/")[2]
    names = [name for name in seaweed.names("kvcache") if name.startswith(folder)]
    (damaged,) = [f"/kvcache/{name}" for name in names if name.endswith(CHAIN[1].hex())]
    (other,) = [f"/kvcache/{name}" for name in names if name.endswith(CHAIN[0].hex())]
    seaweed.call("PUT", damaged, seaweed.call("GET", other).content).raise_for_status()
    assert second.finds(CHAIN[:2]) == 2
    assert second.load(CHAIN[:2], [1, 2]) is False
    assert second.tier.manager.lookup(CHAIN[:2]) == 0
    assert second.finds(CHAIN[:2]) == 1, "it was deleted"
    assert second.store(CHAIN[1:2], [2])
    assert start().load(CHAIN[:2], [1, 2])
    seaweed.call("DELETE", damaged).raise_for_status()
    assert second.load(CHAIN[:2], [1, 2]) is False, "the bucket's own rules have deleted one"


def test_what_a_node_distrusts_is_read_by_no_other_and_who_has_some_of_it_hears(start: Start) -> None:
    wrong, reader, other = start(), start(), start()
    assert wrong.store(CHAIN[:2], [1, 2])
    assert reader.finds(CHAIN[:2]) == 2
    assert reader.load(CHAIN[:1], [1])
    wrong.reset()
    assert not wrong.tier.manager.distrusted
    until(lambda: bool(reader.tier.manager.distrusted))  # it has loaded some of it
    assert reader.tier.manager.lookup(CHAIN) == 0
    assert start().finds(CHAIN) == 0
    reader.reset()
    assert not reader.tier.manager.distrusted
    until(lambda: other.finds(CHAIN) == 0)
    assert not other.tier.manager.distrusted, "it has nothing of it"
    # One doubt begins one era: the reader's own reset began none.
    assert reader.store(CHAIN[:1], [4])
    assert wrong.finds(CHAIN[:1]) == 1


def test_a_store_that_was_planned_before_everything_was_forgotten_is_not_made(start: Start) -> None:
    node = start()
    room = node.tier.manager.prepare_store(CHAIN[:1])
    assert room is not None
    node.tier.manager.reset()
    node.tier.mover.submit([Copy(900_000, [1], [0], CHAIN[:1], resets=0)], [])
    assert ended(node.tier.mover, 900_000) == {900_000: False}
    node.tier.manager.complete_store(room, written=False)
    assert start().finds(CHAIN[:1]) == 0


def test_a_load_that_an_era_overtakes_is_not_right(start: Start) -> None:
    wrong, reader = start(), start()
    assert wrong.store(CHAIN[:1], [1])
    assert reader.finds(CHAIN[:1]) == 1
    wrong.reset()
    assert reader.load(CHAIN[:1], [1]) is False
    assert reader.tier.manager.distrusted or reader.finds(CHAIN[:1]) == 0


def test_single_keys_are_forgotten_for_all(start: Start) -> None:
    node, reader = start(), start()
    assert node.store(CHAIN[:3], [1, 2, 3])
    node.tier.manager.forget(CHAIN[1:])
    until(lambda: not node.thread.has_first)
    assert reader.finds(CHAIN[:3]) == 1
    assert start().finds(CHAIN[1:2]) == 0
    room = node.tier.manager.prepare_store(CHAIN[3:4])
    assert room is not None
    node.tier.manager.forget(CHAIN[3:4])
    node.tier.mover.submit([Copy(900_001, [1], [0], CHAIN[3:4])], [])
    assert ended(node.tier.mover, 900_001) == {900_001: False}, "its store was under way"
    node.tier.manager.complete_store(room, written=False)


def test_a_store_that_hangs_is_left_out_by_name_and_used_again(start: Start, seaweed: SeaweedStore) -> None:
    node = start()
    assert node.store(CHAIN[:1], [1])
    seaweed.hang()
    assert node.load(CHAIN[:1], [2], within_s=0.2) is None
    assert node.tier.status().left_out.endswith("it did not answer in time")
    assert seaweed.host in node.tier.status().left_out
    late = start()  # it starts all the same
    assert "in time" in late.tier.status().left_out
    assert late.tier.manager.prepare_store(CHAIN[:1]) is None
    seaweed.go_on()
    for one in (node, late):
        one.clock.now += FIRST_OUT_S
        one.tier.mover.submit([], [])
        until(lambda one=one: not one.tier.mover.left_out)
    assert node.load(CHAIN[:1], [2])
    assert late.finds(CHAIN[:1]) == 1


def test_a_store_that_refuses_us_stops_the_start_and_says_why(seaweed: SeaweedStore) -> None:
    with pytest.raises(ConfigurationError, match="no such bucket"):
        StoreNode(f"http://{seaweed.host}/there-is-none/kv", seaweed)
    seaweed.credentials.with_name("others").write_text(
        "[default]\naws_access_key_id = tandem-key\naws_secret_access_key = wrong\n"
    )
    url = seaweed.bucket("kvcache")
    options = {"url": url, "credentials": str(seaweed.credentials.with_name("others"))}
    tier = ObjectTier(TierConfig(spec="objects", options=options))
    with pytest.raises(ConfigurationError, match="refuses this key: 403 SignatureDoesNotMatch"):
        tier.open(KVCacheMemory(torch.rand(4, 2, 2, 3, 4, 8), "m", 2, 1, 100), lambda: None)
