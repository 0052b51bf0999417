"""How much room the decode nodes have for new requests, kept up to date with each of them."""

from __future__ import annotations

from tandem.router.policy.types import NodeSnapshot


class _Alike:
    """Nodes where a request takes equally many blocks."""

    def __init__(self) -> None:
        self.views: dict[str, NodeSnapshot] = {}
        self.blocks: dict[str, int] = {}  # that are free there and that no request there is expected to take
        # No node has more. The one that had so many may have fewer now.
        self._most = 0
        self._roomiest = ""

    def put(self, view: NodeSnapshot, blocks: int) -> None:
        node_id = view.info.node_id
        self.views[node_id] = view
        self.blocks[node_id] = blocks
        if blocks >= self._most:
            self._most, self._roomiest = blocks, node_id

    def drop(self, node_id: str) -> None:
        self.views.pop(node_id, None)
        self.blocks.pop(node_id, None)

    def roomiest(self, needed: int) -> NodeSnapshot | None:
        """A node with as many blocks. One that has the most is only looked for when the last one has too few."""
        if needed > self._most:
            return None
        if self.blocks.get(self._roomiest, -1) < needed:
            self._roomiest = max(self.blocks, key=self.blocks.__getitem__, default="")
            self._most = max(0, self.blocks.get(self._roomiest, 0))
            if self.blocks.get(self._roomiest, -1) < needed:
                return None
        return self.views[self._roomiest]


class Room:
    def __init__(self) -> None:
        self._alike: dict[tuple[int, bool, int], _Alike] = {}
        self._of_node: dict[str, _Alike] = {}
        self._idle: set[str] = set()  # nodes without work, which take any request

    def put(self, view: NodeSnapshot, is_idle: bool, blocks: int) -> None:
        info = view.info
        node_id = info.node_id
        alike = self._of_node.get(node_id)
        if alike is None:
            geometry = (info.block_size, info.keeps_tokens, info.state_blocks)
            alike = self._of_node[node_id] = self._alike.setdefault(geometry, _Alike())
        alike.put(view, blocks)
        if is_idle:
            self._idle.add(node_id)
        elif node_id in self._idle:
            self._idle.remove(node_id)

    def drop(self, node_id: str) -> None:
        self._idle.discard(node_id)
        if (alike := self._of_node.pop(node_id, None)) is not None:
            alike.drop(node_id)

    def roomiest(self, tokens: int) -> NodeSnapshot | None:
        """A node that has the blocks for so many tokens."""
        for alike in self._alike.values():
            for view in alike.views.values():
                found = alike.roomiest(view.info.blocks_for(tokens))
                if found is not None:
                    return found
                break
        return None

    def has_room(self, tokens: int, promised: int) -> bool:
        """Whether a node has the blocks for a sequence of `tokens`, beside all those that were let in and are not sent yet."""
        if not self._idle and self.roomiest(tokens) is None:
            return False
        if promised == 0:
            return True
        room = sum(view.room_tokens for alike in self._alike.values() for view in alike.views.values())
        return promised + tokens <= room
