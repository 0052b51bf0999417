"""An encoder node: a vision tower and no engine. Prefill and aggregated nodes ask it for the rows of images."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tandem.base.errors import ConfigurationError, Unavailable
from tandem.encode_node.service import EncodeService, RowsCache
from tandem.engine.model.runner import ModelRunner
from tandem.node.config import NodeConfig
from tandem.node.node import LoadSource, Node
from tandem.wire.lines import NumberedChannel
from tandem.wire.nodes import NodeInfo, Role


class EncodeNode(Node[EncodeService]):
    def __init__(self, config: NodeConfig) -> None:
        super().__init__(config, Role.ENCODE, NumberedChannel)

    def _start(self, loading: LoadSource) -> NodeInfo:
        # Imported here: the cluster imports nodes for their configuration, and must not import torch.
        from tandem.engine.model.lone_tower import tower_loader

        if loading.runner is not None:
            raise ConfigurationError("an encoder node cannot take over a model that another node has loaded")
        engine = self.config.engine
        tower = tower_loader().load_tower(loading.model, engine.scheduler.max_model_len, loading.progress)
        cache = RowsCache(engine.cache.encoder_tokens)
        channel = self._serve(lambda channel: EncodeService(self.config, self.epoch, tower, cache, channel))
        return NodeInfo(
            node_id=self.config.node_id,
            role=Role.ENCODE,
            epoch=self.epoch,
            request_endpoint=channel.endpoint,
            peer_endpoint=self._serving().endpoint,
            model=tower.info.name,
            max_model_len=tower.info.max_model_len,
            block_size=engine.cache.block_size,
            content=tower.info.content,
            tokenizer=tower.info.tokenizer,
        )

    def set_adapters(self, folders: Mapping[str, str], kept: Collection[str], timeout_s: float) -> dict[str, str]:
        """Does nothing: adapters change nothing that this node computes."""
        return {}

    def release(self) -> ModelRunner:
        raise Unavailable(f"{self.config.node_id} has only a vision tower, so its role cannot change")
