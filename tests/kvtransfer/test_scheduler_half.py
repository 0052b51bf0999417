"""The scheduler half turns the events of requests into commands for the worker half."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from kv_fake_engine import FakeRequest, FakeStep, consume, produce

from tandem.base.errors import ConfigurationError
from tandem.kvtransfer.base import ConnectorContext, ConnectorOutput, Handoff, KVCacheMemory, LoadFailure
from tandem.kvtransfer.config import TransferConfig
from tandem.kvtransfer.multi import create_connector
from tandem.kvtransfer.protocol.commands import (
    AbandonSend,
    AnnounceSend,
    BeginReceive,
    CallBackSend,
    CancelReceive,
    DeclineTransfer,
    ExtendSend,
    FinishSend,
    PlanSend,
    StepCommands,
    VoidSend,
)
from tandem.kvtransfer.protocol.halves import SchedulerHalf, WorkerHalf, token_hash
from tandem.kvtransfer.protocol.transport import Direction, HandleId, Move, RemoteId, Transport
from tandem.kvtransfer.registry import CONNECTORS, find_connector
from tandem.wire.embeds import PromptEmbeds
from tandem.wire.handoff import CacheMemory
from tandem.wire.images import MediaFeature
from tandem.wire.nodes import PeerAddress
from tests.wire.members import address_of

PEER = PeerAddress("peer", 9, "tcp://peer")
TOKENS = list(range(10))
HASH = token_hash(TOKENS, None, None)


def planned(half: SchedulerHalf, step: FakeStep | None = None) -> StepCommands:
    plan = half.build_connector_meta(step or FakeStep())
    assert isinstance(plan, StepCommands)
    return plan


def added(half: SchedulerHalf, role: str = "produce", tokens: list[int] = TOKENS) -> FakeRequest:
    transfer = produce("t", PEER) if role == "produce" else consume("t", PEER)
    request = FakeRequest("r", list(tokens), transfer)
    half.on_new_request(request)
    return request


@pytest.mark.parametrize("role", ["produce", "consume"])
def test_the_protocol_learns_that_no_one_waits_for_it(role: str) -> None:
    half = SchedulerHalf(4)
    request = added(half, role)
    request.when_idle = True
    half.get_num_new_matched_tokens(request, 0)
    half.update_state_after_alloc(request, [[1, 2, 3]], 10)
    command = planned(half).before_forward[-1]
    assert isinstance(command, PlanSend | BeginReceive)
    assert command.when_idle


def test_a_request_without_a_transfer_is_none_of_its_business() -> None:
    half = SchedulerHalf(4)
    request = FakeRequest("r", TOKENS, None)
    half.on_new_request(request)
    assert half.get_num_new_matched_tokens(request, 0) == (0, False)
    half.update_state_after_alloc(request, [[1, 2, 3]], 0)
    plan = planned(half, FakeStep({"r": 10}))
    assert (plan.before_forward, plan.computed) == ([], {})
    assert not half.request_finished(request, [[1, 2, 3]])
    assert not half.has_pending_work()


def test_a_producers_prompt_in_chunks() -> None:
    half = SchedulerHalf(4)
    request = added(half)
    assert half.get_num_new_matched_tokens(request, 0) == (0, False)
    request.num_computed_tokens = 4  # found here, or loaded from elsewhere
    half.update_state_after_alloc(request, [[5, 6]], 0)
    plan = planned(half, FakeStep({"r": 3}))
    assert plan.before_forward == [AnnounceSend("r", "t"), PlanSend("r", "t", PEER, 10, HASH, [[5, 6]])]
    assert plan.computed == {"r": 7}
    plan = planned(half, FakeStep({"r": 3}, new_blocks={"r": [9]}))
    assert plan.before_forward == [ExtendSend("r", [[9]])]
    assert plan.computed == {"r": 10}
    request.all_token_ids.append(77)
    assert half.request_finished(request, [[5, 6, 9]])
    assert half.has_pending_work()
    assert planned(half).before_forward == [FinishSend("r", 77, [[5, 6, 9]])]
    assert not half.has_pending_work()


def test_a_preempted_prompt_begins_again_with_other_blocks() -> None:
    half = SchedulerHalf(4)
    request = added(half)
    half.get_num_new_matched_tokens(request, 0)
    half.update_state_after_alloc(request, [[5, 6]], 0)
    planned(half, FakeStep({"r": 8}))
    assert planned(half, FakeStep(preempted_req_ids={"r", "another"})).preempted == ["r"]
    half.get_num_new_matched_tokens(request, 4)
    request.num_computed_tokens = 4
    half.update_state_after_alloc(request, [[5, 11, 12]], 0)
    plan = planned(half, FakeStep({"r": 6}, new_blocks={"r": [5, 11, 12]}))
    assert plan.before_forward == [PlanSend("r", "t", PEER, 10, HASH, [[5, 11, 12]])]
    assert plan.computed == {"r": 10}


def test_a_request_that_moves_here_with_output_hashes_all_that_it_has() -> None:
    half = SchedulerHalf(4)
    request = FakeRequest("r", list(TOKENS), produce("t", PEER))
    request.num_prompt_tokens = 6
    half.on_new_request(request)
    half.get_num_new_matched_tokens(request, 0)
    half.update_state_after_alloc(request, [[1, 2, 3]], 0)
    announced, plan = planned(half).before_forward
    assert announced == AnnounceSend("r", "t"), "its consumer is told that it waits, as long as it waits"
    assert isinstance(plan, PlanSend)
    assert (plan.num_tokens, plan.token_hash) == (10, HASH)


def test_the_hash_knows_the_salt_and_the_adapter() -> None:
    hashes = {token_hash(TOKENS, salt, lora) for salt in (None, "", "a") for lora in (None, "", "a")}
    assert len(hashes) == 9


def test_the_hash_knows_which_images_or_rows_stand_behind_the_placeholders() -> None:
    def one(*media: MediaFeature) -> bytes:
        return token_hash(TOKENS, "a", None, media)

    image, other, later = MediaFeature("x/0", 2, 3), MediaFeature("y/0", 2, 3), MediaFeature("x/0", 3, 3)
    assert len({one(), one(image), one(other), one(later), one(image, other)}) == 5
    rows = [PromptEmbeds("float32", 1, bytes([value] * 4 * len(TOKENS))).features() for value in (1, 2)]
    assert one(*rows[0]) != one(*rows[1])
    assert one() == token_hash(TOKENS, "a", None), "nodes that know of no media agree about text"


def test_both_nodes_hash_what_the_request_brings() -> None:
    half = SchedulerHalf(4)
    request = FakeRequest("r", list(TOKENS), produce("t", PEER), media=[MediaFeature("x/0", 2, 3)])
    half.on_new_request(request)
    half.update_state_after_alloc(request, [[1, 2, 3]], 0)
    plan = planned(half).before_forward[-1]
    assert isinstance(plan, PlanSend)
    assert plan.token_hash == token_hash(TOKENS, None, None, request.media) != HASH


def test_a_producer_calls_off_what_turned_out_wrong() -> None:
    half = SchedulerHalf(4)
    request = added(half)
    half.update_state_after_alloc(request, [[5, 6, 7]], 0)
    planned(half, FakeStep({"r": 10}))
    half.forget_after(request, 4)
    assert planned(half).before_forward == [VoidSend("r")]
    half.forget_after(FakeRequest("other", list(TOKENS), None), 0)
    assert planned(half).before_forward == []


def test_a_producer_is_told_whose_blocks_are_called_back() -> None:
    half = SchedulerHalf(4)
    request = added(half)
    half.update_state_after_alloc(request, [[5, 6, 7]], 0)
    planned(half, FakeStep({"r": 10}))
    half.call_back(request)
    assert planned(half).before_forward == [CallBackSend("r")]
    half.call_back(FakeRequest("loads", list(TOKENS), consume("t", PEER)))
    assert planned(half).before_forward == []


def test_a_producers_request_that_ends_early_is_kept_only_if_its_blocks_are_known() -> None:
    half = SchedulerHalf(4)
    assert not half.request_finished(added(half), [[]])
    assert planned(half).before_forward == [AnnounceSend("r", "t"), AbandonSend("r", "t", kept=False)]
    request = added(half)
    half.update_state_after_alloc(request, [[1]], 0)
    assert half.request_finished(request, [[1]])
    assert planned(half).before_forward[-1] == AbandonSend("r", "t", kept=True)


def test_a_consumer_asks_once_and_for_what_it_lacks() -> None:
    half = SchedulerHalf(4)
    request = added(half, "consume")
    assert half.get_num_new_matched_tokens(request, 4) == (6, True)
    assert half.get_num_new_matched_tokens(request, 4) == (6, True)  # there were no blocks: the scheduler asks again
    half.update_state_after_alloc(request, [[7, 8, 9, 10]], 6)  # one more than it needs
    assert planned(half).before_forward == [BeginReceive("r", "t", PEER, 10, 4, HASH, [1], [[8, 9]])]
    assert half.get_num_new_matched_tokens(request, 0) == (0, False)
    half.update_state_after_alloc(request, [[7, 8, 9, 10, 11]], 0)
    assert not half.has_pending_work()


def test_a_consumers_abort_depends_on_how_far_it_got() -> None:
    half = SchedulerHalf(4)
    assert not half.request_finished(added(half, "consume"), [[]])
    assert planned(half).before_forward == [DeclineTransfer("t", PEER)]

    request = added(half, "consume")
    half.get_num_new_matched_tokens(request, 0)
    half.update_state_after_alloc(request, [[1, 2, 3]], 10)
    planned(half)
    assert half.request_finished(request, [[1, 2, 3]])
    assert planned(half).before_forward == [CancelReceive("r")]

    for output in (
        ConnectorOutput(finished_recving={"r": Handoff(1, 10)}),
        ConnectorOutput(failed_recving={"r": LoadFailure("why")}),
    ):
        request = added(half, "consume")
        half.get_num_new_matched_tokens(request, 0)
        half.update_state_after_alloc(request, [[1, 2, 3]], 10)
        planned(half)
        half.update_connector_output(output)
        assert half.get_num_new_matched_tokens(request, 0) == (0, False)
        assert not half.request_finished(request, [[1, 2, 3]])
        assert not half.has_pending_work()


def test_states_are_received_whole_whatever_is_here_of_the_tokens() -> None:
    half = SchedulerHalf(4, state_blocks=5)
    request = added(half, "consume")
    assert half.get_num_new_matched_tokens(request, 4) == (6, True)
    half.update_state_after_alloc(request, [[1, 2, 3, 4], [11, 12, 13, 14, 15]], 6)
    (begin,) = planned(half).before_forward
    assert isinstance(begin, BeginReceive)
    assert (begin.first_block, begin.block_ids) == ([1, 0], [[2, 3], [11, 12, 13, 14, 15]])


def sent_with_states(steps: list[int], computed: int) -> list[object]:
    half = SchedulerHalf(4, state_blocks=2)
    request = added(half)
    tables = [[5, 6, 7], [8, 9]]
    half.get_num_new_matched_tokens(request, 0)
    half.update_state_after_alloc(request, tables, 0)
    for tokens in steps:
        planned(half, FakeStep({"r": tokens}))
    request.num_computed_tokens = computed
    request.all_token_ids.append(77)
    assert half.request_finished(request, tables)
    return planned(half).before_forward  # type: ignore[return-value]


def test_the_states_after_the_last_token_are_handed_over() -> None:
    assert sent_with_states([6, 4], computed=10) == [FinishSend("r", 77, [[5, 6, 7], [8, 9]])]


@pytest.mark.parametrize(("steps", "computed"), [([6, 4, 1], 10), ([6, 5], 11)])
def test_states_of_a_later_token_are_not(steps: list[int], computed: int) -> None:
    """A step that ran ahead took them along, though what it sampled is void. The consumer computes the prompt itself."""
    assert sent_with_states(steps, computed) == [AbandonSend("r", "t", kept=True)]


class ClosingTransport(Transport):
    """Notes whether a socket listened at an address when it was closed."""

    name = "closing"
    endpoint = ""
    was_reachable = False

    def close(self) -> None:
        host, port = address_of(self.endpoint)
        with socket.create_connection((host, int(port)), timeout=5):
            self.was_reachable = True

    def register(self, memory: KVCacheMemory) -> CacheMemory:
        raise NotImplementedError

    def connect(self, memory: CacheMemory) -> RemoteId:
        raise NotImplementedError

    def disconnect(self, remote: RemoteId) -> None:
        raise NotImplementedError

    def post(self, remote: RemoteId, move: Move) -> HandleId:
        raise NotImplementedError

    def is_done(self, handle: HandleId) -> bool:
        raise NotImplementedError


def test_a_node_that_nobody_listens_for_any_more_writes_nothing_any_more() -> None:
    """Peers reuse their blocks when they find its address closed."""
    transport = ClosingTransport()
    context = ConnectorContext("n", 1, "127.0.0.1", 4, TransferConfig(), wake=lambda: None)
    worker = WorkerHalf(context, transport, Direction.PUSH)
    transport.endpoint = worker.peer_endpoint
    worker.shutdown()
    assert transport.was_reachable


def context(**config: object) -> ConnectorContext:
    return ConnectorContext("n", 1, "127.0.0.1", 16, TransferConfig(**config), lambda: None)  # type: ignore[arg-type]


def test_every_registered_connector_is_there() -> None:
    for name in CONNECTORS:
        assert callable(find_connector(name))


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigurationError, match=r"no connector 'teleport'; there are .*nixl"):
        find_connector("teleport")


@pytest.mark.parametrize("name", ["", ":", "os:", ":create", "no.such.module:create", "os:no_such_name", "os:sep"])
def test_a_path_that_leads_nowhere_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"transfer\.connector"):
        find_connector(name)


def test_a_module_that_fails_to_import_is_a_configuration_error(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "broken_connector.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match="no_such_dependency"):
        find_connector("broken_connector:create")


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"direction": "sideways"}, r"transfer\.direction must be one of push, pull, not 'sideways'"),
        ({"options": {"speed": "11"}}, r"transfer\.options of the nixl connector: .*speed"),
        ({"options": {"progress_ms": "0"}}, r"progress_ms must be at least 1"),
        ({"options": {"progress_ms": "often"}}, r"transfer\.options of the nixl connector"),
        ({"options": {"backend": "CARRIER_PIGEON"}}, r"no 'CARRIER_PIGEON' here, only .*UCX"),
        ({"lease_s": 0}, r"transfer\.lease_s must be above 0"),
        ({"lease_s": 1e9}, r"transfer\.lease_s must be at most 3600"),
        ({"timeout_s": -1}, r"transfer\.timeout_s must be above 0"),
        ({"handshake_timeout_s": float("nan")}, r"transfer\.handshake_timeout_s must be above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(config: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        create_connector(context(**config))


@pytest.mark.slow
def test_naming_a_connector_does_not_load_the_others() -> None:
    """Slow: a Python of its own, to see what it has imported."""
    program = (
        "import sys; import tandem.kvtransfer.registry as r; r.find_connector('json:dumps');"
        "print([m for m in sys.modules if m.startswith(('nixl', 'torch', 'tandem.kvtransfer.nixl'))])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "[]"
