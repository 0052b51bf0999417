"""Several connectors as one: which one loads, which calls each one gets, and when a finished request's blocks are free."""

from __future__ import annotations

import pytest
from kv_fake_engine import FakeRequest, FakeStep

from tandem.base.errors import TransferError
from tandem.kvtransfer.base import (
    BlockIds,
    ConnectorMetadata,
    ConnectorOutput,
    Handoff,
    KVCacheMemory,
    LoadFailure,
    ScheduledStep,
    SchedulerConnector,
    TransferRequest,
    TransferStats,
    WorkerConnector,
)
from tandem.kvtransfer.multi import MultiScheduler, MultiWorker, PartsOutput, merged_stats
from tandem.wire.requests import TierStatus, WaitHistogram


class Planner(SchedulerConnector):
    def __init__(self, offer: tuple[int | None, bool] = (0, False)) -> None:
        self.offer = offer
        self.keeps = False
        self.asked = 0
        self.allocated: list[int] = []
        self.resets = 0

    def get_num_new_matched_tokens(self, request: TransferRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.asked += 1
        return self.offer

    def update_state_after_alloc(self, request: TransferRequest, block_ids: BlockIds, num_external_tokens: int) -> None:
        self.allocated.append(num_external_tokens)

    def build_connector_meta(self, step: ScheduledStep) -> ConnectorMetadata:
        return ConnectorMetadata()

    def request_finished(self, request: TransferRequest, block_ids: BlockIds) -> bool:
        return self.keeps

    def reset_cache(self) -> None:
        self.resets += 1


REQUEST = FakeRequest("r", list(range(20)), None)


def reported(multi: MultiScheduler, *parts: ConnectorOutput) -> ConnectorOutput:
    output = ConnectorOutput(worker_metadata=PartsOutput(list(parts)))
    multi.update_connector_output(output)
    return output


def test_the_first_that_can_load_loads_and_the_others_hear_of_the_blocks_when_it_runs() -> None:
    parts = [Planner(), Planner((8, True)), Planner((12, True))]
    multi = MultiScheduler(parts)
    assert multi.get_num_new_matched_tokens(REQUEST, 0) == (8, True)
    assert parts[2].asked == 0
    multi.update_state_after_alloc(REQUEST, [[1, 2]], 8)
    assert [part.allocated for part in parts] == [[], [8], []]
    multi.update_state_after_alloc(REQUEST, [[1, 2, 3]], 0)
    assert [part.allocated for part in parts] == [[0], [8, 0], [0]]


def test_a_load_that_is_there_at_once_is_told_to_all_at_once() -> None:
    parts = [Planner((8, False)), Planner()]
    multi = MultiScheduler(parts)
    assert multi.get_num_new_matched_tokens(REQUEST, 0) == (8, False)
    multi.update_state_after_alloc(REQUEST, [[1, 2]], 8)
    assert [part.allocated for part in parts] == [[8], [0]]


def test_one_that_cannot_say_yet_makes_all_wait() -> None:
    parts = [Planner((None, False)), Planner((8, True))]
    assert MultiScheduler(parts).get_num_new_matched_tokens(REQUEST, 0) == (None, False)
    assert parts[1].asked == 0


def test_blocks_are_kept_until_the_last_lets_go() -> None:
    parts = [Planner(), Planner(), Planner()]
    parts[0].keeps = parts[2].keeps = True
    multi = MultiScheduler(parts)
    assert multi.request_finished(REQUEST, [[1]])
    sent, nothing = ConnectorOutput(finished_sending={"r"}), ConnectorOutput()
    assert reported(multi, sent, nothing, nothing).is_empty
    assert reported(multi, nothing, nothing, sent).finished_sending == {"r"}
    parts[0].keeps = parts[2].keeps = False
    assert not multi.request_finished(REQUEST, [[1]])


def test_a_failed_load_is_told_when_the_last_lets_go_without_blocks_that_are_safe_by_then() -> None:
    parts = [Planner(), Planner()]
    parts[0].keeps = parts[1].keeps = True
    multi = MultiScheduler(parts)
    multi.request_finished(REQUEST, [[1, 2]])
    nothing = ConnectorOutput()
    failed = ConnectorOutput(failed_recving={"r": LoadFailure("lost", 0, frozenset({1, 2}))})
    assert reported(multi, failed, nothing).is_empty
    early = reported(multi, ConnectorOutput(released_blocks={1, 9}), nothing)
    assert early.released_blocks == {9}
    late = reported(multi, nothing, ConnectorOutput(finished_sending={"r"}))
    assert late.failed_recving == {"r": LoadFailure("lost", 0, frozenset({2}))}
    assert not late.finished_sending


def test_what_happens_to_requests_that_run_is_passed_on() -> None:
    multi = MultiScheduler([Planner(), Planner()])
    output = reported(
        multi,
        ConnectorOutput(finished_recving={"a": Handoff(5, 9)}, unwanted_sending={"u"}),
        ConnectorOutput(failed_recving={"b": LoadFailure("lost")}, invalid_block_ids={3}),
    )
    assert output.finished_recving == {"a": Handoff(5, 9)}
    assert output.failed_recving == {"b": LoadFailure("lost")}
    assert (output.unwanted_sending, output.invalid_block_ids) == ({"u"}, {3})


def test_all_forget_together() -> None:
    parts = [Planner(), Planner()]
    MultiScheduler(parts).reset_cache()
    assert [part.resets for part in parts] == [1, 1]


class Mover(WorkerConnector):
    def __init__(self, layerwise: bool = False, endpoint: str = "") -> None:
        self._layerwise = layerwise
        self._endpoint = endpoint
        self.calls: list[str] = []

    @property
    def layerwise(self) -> bool:
        return self._layerwise

    @property
    def peer_endpoint(self) -> str:
        return self._endpoint

    def register_kv_caches(self, memory: KVCacheMemory) -> None: ...

    def bind_connector_metadata(self, metadata: ConnectorMetadata) -> None:
        self.calls.append("bind")

    def save_kv_layer(self, layer: int) -> None:
        self.calls.append(f"layer {layer}")

    def get_finished(self, finished_req_ids: set[str]) -> ConnectorOutput:
        return ConnectorOutput(finished_sending={self._endpoint})


def test_workers_get_their_own_part_and_layers_go_to_those_that_want_them() -> None:
    movers = [Mover(), Mover(layerwise=True, endpoint="tcp://here")]
    worker = MultiWorker(movers)
    assert worker.layerwise
    assert worker.peer_endpoint == "tcp://here"
    planner = MultiScheduler([Planner(), Planner()])
    worker.bind_connector_metadata(planner.build_connector_meta(FakeStep()))
    worker.save_kv_layer(3)
    assert [mover.calls for mover in movers] == [["bind"], ["bind", "layer 3"]]
    output = worker.get_finished(set())
    planner.update_connector_output(output)
    assert output.finished_sending == {"", "tcp://here"}


class Ending(Mover):
    def shutdown(self) -> None:
        self.calls.append("end")
        if self.peer_endpoint:
            raise TransferError("giving back the KV cache's registration")


def test_an_end_that_fails_in_one_part_ends_the_others_too() -> None:
    movers = [Ending(endpoint="tcp://here"), Ending(), Ending()]
    with pytest.raises(TransferError, match="giving back"):
        MultiWorker(movers).shutdown()
    assert [mover.calls for mover in movers] == [["end"]] * 3


def test_counts_are_added_and_lists_are_joined() -> None:
    tier = TierStatus("cpu", 1, 2, 3, 4, 5, 6, 7)
    merged = merged_stats(
        [
            TransferStats(bytes_sent=3, outcomes={"sent": 2}, waits={"register": WaitHistogram().plus(1.0)}),
            TransferStats(bytes_sent=4, outcomes={"sent": 1, "aborted": 1}, tiers=[tier]),
        ]
    )
    assert merged == TransferStats(
        bytes_sent=7, outcomes={"sent": 3, "aborted": 1}, waits={"register": WaitHistogram().plus(1.0)}, tiers=[tier]
    )
