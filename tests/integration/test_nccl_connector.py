"""The NCCL connector through all processes: torch.distributed with gloo between real nodes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from tandem.kvtransfer.config import TransferConfig
from tests.integration.conftest import Deploy, float32_config
from tests.integration.reference import ExpectedAnswer
from tests.integration.test_end_to_end import AT_ONCE, assert_same, stream_all


def test_the_nccl_connector_gives_the_same_tokens(
    deploy: Deploy, smollm2_path: Path, expected: list[ExpectedAnswer]
) -> None:
    """Two prefill nodes and one decode node: a pair for each of the two."""
    config = msgspec.structs.replace(
        float32_config(smollm2_path, prefill=2, decode=1),
        # gloo is slow beside two cores that compute: without patience some prompts would be computed again.
        transfer=TransferConfig(connector="nccl", lease_s=30.0, patience_s=60.0),
    )
    with deploy(config) as server:
        assert_same(asyncio.run(stream_all(server, expected, AT_ONCE)), expected)
        server.until_quiet()
        decode = server.counters("decode")
        assert decode["prompt_tokens_computed"] == 0
        assert server.counters("prefill")["transfer_bytes_sent"] == decode["transfer_bytes_received"] > 0
        metrics = server.http.get("/metrics").text
        assert 'tandem_node_transfer_blocks_freed_total{by="sent"' in metrics
        assert "tandem_node_transfer_wait_seconds_bucket{le" in metrics
