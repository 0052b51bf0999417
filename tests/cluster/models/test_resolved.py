"""What follows from the model and from other sections is filled in where it is read."""

from __future__ import annotations

import msgspec

from tandem.cluster.config import TandemConfig
from tandem.cluster.models.resolved import with_model
from tandem.cluster.models.store import Model
from tandem.engine.config import SchedulingPolicy


def test_the_routers_line_goes_by_priority_where_nodes_do() -> None:
    model = Model("here", "name")
    config = TandemConfig()
    assert not with_model(config, model).router.by_priority
    policy = msgspec.structs.replace(config.scheduler, policy=SchedulingPolicy.PRIORITY)
    assert with_model(msgspec.structs.replace(config, scheduler=policy), model).router.by_priority
