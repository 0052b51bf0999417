"""Which running process a controller that comes back adopts."""

from __future__ import annotations

import msgspec
import pytest

from tandem.cluster.on_ray.runtime import import_ray
from tandem.engine.config import CacheConfig, EngineConfig
from tandem.kvtransfer.base import TransferConfig
from tandem.node.config import NodeConfig
from tandem.wire.nodes import Role

NODE = NodeConfig(
    node_id="prefill-0", role=Role.PREFILL, host="10.0.0.2", transfer=TransferConfig(), cores=[0, 1]
)
replace = msgspec.structs.replace


@pytest.mark.slow
def test_a_node_with_the_same_configuration_is_adopted_also_when_its_role_was_changed() -> None:
    """Slow: imports Ray. Starts nothing."""
    import_ray()
    from tandem.cluster.on_ray.launcher import is_same_node

    running = msgspec.msgpack.encode(NODE)
    assert is_same_node(running, NODE)
    assert is_same_node(running, replace(NODE, role=Role.DECODE))
    assert is_same_node(running, replace(NODE, role=Role.AGGREGATED, transfer=None))
    assert not is_same_node(running, replace(NODE, host="10.0.0.3"))
    assert not is_same_node(running, replace(NODE, cores=[0]))
    other = EngineConfig(cache=CacheConfig(memory_bytes=1 << 30))
    assert not is_same_node(running, replace(NODE, engine=other))
