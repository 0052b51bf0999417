"""What a change of the pools' sizes is expected to bring, said before it is ordered. Whatever goes wrong here is a sentence: the change is made
all the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from tandem.base.errors import TandemError
from tandem.cluster.control import ClusterView, Expectation, not_foretold
from tandem.cluster.orders import FORETELL_S, ForetellOrder, OperatedCluster
from tandem.cluster.tasks import saying_if_slow
from tandem.wire.nodes import Role

LIMIT_S = FORETELL_S + 3.0  # with the way to the controller

Say = Callable[[str], None]


async def foretold(cluster: OperatedCluster, sizes: Mapping[Role, int], say: Say) -> Expectation:
    """Says what these sizes are expected to bring, or why nothing can be said. To be followed by the change, which is graded by that."""
    if not sizes:
        return Expectation()
    try:
        async with asyncio.timeout(LIMIT_S):
            work = cluster.ask(ForetellOrder(dict(sizes)))
            expected = await saying_if_slow(work, lambda: say("simulating what it will bring: a few seconds"))
    except TimeoutError:
        expected = not_foretold(f"that took more than {LIMIT_S:.0f} s")
    except TandemError as error:
        expected = not_foretold(str(error))
    if expected.said:
        say(expected.said)
    return expected


def as_json(expected: Expectation) -> dict[str, Any]:
    why = {"not_foretold": expected.not_foretold} if expected.not_foretold else {}
    return {"forecast": expected.forecast, **why}


def after_role(view: ClusterView, node_id: str, role: Role) -> Mapping[Role, int]:
    """Returns the sizes after this node has become one of another role."""
    before = next((node.role for node in view.nodes if node.node_id == node_id), role)
    there = {pool.role: pool.wanted for pool in view.pools}
    return {before: there.get(before, 0) - 1, role: there.get(role, 0) + 1} if before is not role else {}
