"""The costs of a serving cluster's nodes, as the nodes have learnt them from their own steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import httpx
import msgspec

from tandem.base.errors import ConfigurationError
from tandem.cluster.api_client import ApiClient, key_from_environment
from tandem.router.page_state import PageState
from tandem.simulator.costs import DEFAULT_START_S, LEAST_STEP_S, CostModel, CostTable, RequestCost, TransferCost
from tandem.simulator.profile_client import ClusterNode, refuse_contexts
from tandem.wire.nodes import ENGINE_ROLES, Role
from tandem.wire.step_costs import FIRST_ROWS, FIRST_TOKENS, MANY_ROWS, MANY_TOKENS, StepCosts

FEWEST = 20  # measurements of a kind of step, from which on a node's costs of it are used
# A table is linear between its sizes. A prompt's pairs grow with its square, so its sizes stand close together.
_PROMPTS = (1, 16, FIRST_TOKENS, 128, 256, MANY_TOKENS, 1024, 2048, 4096, 8192)
_ROWS = (1, FIRST_ROWS, MANY_ROWS, 256)


class _Counters(msgspec.Struct):
    step_costs: StepCosts | None = None
    transfer_bytes_received: int = 0
    transfer_blocks_received: int = 0


class LearntNode(ClusterNode):
    """A node with what it has learnt, as GET /cluster tells of it."""

    counters: _Counters | None = None

    @property
    def learnt(self) -> StepCosts:
        return (self.counters.step_costs if self.counters is not None else None) or StepCosts()


class _Cluster(msgspec.Struct):
    nodes: list[LearntNode]


class LearntCosts(NamedTuple):
    costs: dict[Role, CostModel]
    note: str


def learnt_costs(url: str, transport: httpx.BaseTransport | None = None) -> LearntCosts:
    """Returns the costs of each role's nodes; of a role that the cluster does not have, from the steps of the other roles. Raises
    ConfigurationError while the nodes have made too few steps."""
    client = ApiClient(url, key_from_environment(), transport)
    try:
        nodes = client.read("/cluster", _Cluster).nodes
        return costs_of_nodes(url, nodes, client.read("/ui/state", PageState))
    finally:
        client.close()


def costs_of_nodes(url: str, nodes: Sequence[LearntNode], page: PageState) -> LearntCosts:
    """`url`: whose nodes they are, for messages."""
    nodes = [node for node in nodes if node.role in ENGINE_ROLES]
    refuse_contexts(nodes)
    readers = [node for node in nodes if node.learnt.prompts_seen >= FEWEST]
    writers = [node for node in nodes if node.learnt.rows_seen >= FEWEST]
    for what, found in (("read prompts", readers), ("write answers", writers)):
        if not found:
            raise ConfigurationError(
                f"no node of {url} has learnt yet what its steps take that {what}: let it serve for some minutes, or use "
                "`tandem profile`"
            )
    for role in ENGINE_ROLES:
        widths = {(node.tensor_parallel, node.pipeline_parallel) for node in nodes if node.role is role}
        if len(widths) > 1:
            raise ConfigurationError(
                f"the {role.value} nodes of {url} are of several widths: give --costs a profile of each"
            )
    costs = {
        role: _costs_of(f"{role.value} nodes of {url}", _of(role, nodes), _of(role, readers), _of(role, writers), page)
        for role in ENGINE_ROLES
    }
    reading = _said("read prompts", readers, "prompts_seen", "prompts_error", "most_prompt_tokens")
    writing = _said("write answers", writers, "rows_seen", "rows_error", "most_rows")
    return LearntCosts(costs, f"{reading}; {writing}")


def _of(role: Role, nodes: Sequence[LearntNode]) -> Sequence[LearntNode]:
    """The nodes of the role; all of them if there is none."""
    return [node for node in nodes if node.role is role] or nodes


def _costs_of(
    name: str,
    nodes: Sequence[LearntNode],
    readers: Sequence[LearntNode],
    writers: Sequence[LearntNode],
    page: PageState,
) -> CostModel:
    longest = min(node.max_model_len for node in nodes)
    reading, writing = [node.learnt for node in readers], [node.learnt for node in writers]
    moved = [node.counters for node in nodes if node.counters is not None]
    blocks_moved = sum(counters.transfer_blocks_received for counters in moved)
    bytes_moved = sum(counters.transfer_bytes_received for counters in moved)
    block_size = nodes[0].block_size
    answered = [account.reading_s for account in page.latest]
    return CostModel(
        name=name,
        max_model_len=longest,
        blocks=min(node.total_blocks for node in nodes) + 1,
        block_size=block_size,
        kv_bytes_per_token=bytes_moved / (blocks_moved * block_size) if blocks_moved else 0.0,
        prefill=_table(
            _PROMPTS,
            longest,
            lambda tokens, before: statistics.fmean(
                one.prompt_s(tokens, tokens * before + tokens * (tokens + 1) / 2) for one in reading
            ),
        ),
        decode=_table(
            _ROWS, longest, lambda rows, before: statistics.fmean(one.rows_s(rows, rows * before) for one in writing)
        ),
        transfer=TransferCost(page.router.handover_s or 0.0),
        request=RequestCost(statistics.median(answered) if answered else 0.0),
        mixed_saved_s=statistics.fmean(one.saved_s for one in writing),
        start_s=max(node.start_s for node in nodes) or DEFAULT_START_S,
        tensor_parallel=nodes[0].tensor_parallel,
        pipeline_parallel=nodes[0].pipeline_parallel,
    )


def _table(sizes: Sequence[int], longest: int, seconds: Callable[[float, float], float]) -> CostTable:
    sizes = [size for size in sizes if size < longest]
    contexts = [0.0, float(longest)]
    return CostTable(
        [float(size) for size in sizes],
        contexts,
        [[max(seconds(size, context), LEAST_STEP_S) for context in contexts] for size in sizes],
    )


def _said(what: str, nodes: Sequence[LearntNode], seen: str, error: str, most: str) -> str:
    """In a few words what these costs come from, and how wrong they were."""
    learnt = [node.learnt for node in nodes]
    wrong = statistics.fmean(getattr(one, error) for one in learnt)
    return (
        f"steps that {what}: {sum(getattr(one, seen) for one in learnt)} measured, of at most {max(getattr(one, most) for one in learnt)} "
        f"tokens; lately {wrong:.0%} wrong on average before each"
    )
