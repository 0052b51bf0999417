"""The rows of images, as an encoder node caches and sends them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from tandem.wire.embeds import PromptEmbeds
from tandem.wire.encoding import MOST_BYTES, EncodedRows, checksum


class RowsCache:
    """Rows by the name of their part, which stands for its content and the cache salt of the request. The least recently used rows make room for new ones."""

    def __init__(self, capacity: int) -> None:
        """`capacity` is in rows, each of which is one token of a prompt."""
        self.capacity = capacity
        self.used = 0
        self._rows: OrderedDict[str, PromptEmbeds] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, identifier: str) -> PromptEmbeds | None:
        rows = self._rows.get(identifier)
        if rows is not None:
            self._rows.move_to_end(identifier)
        return rows

    def keep(self, identifier: str, rows: PromptEmbeds) -> None:
        """Keeps the rows, unless they are more than the whole cache holds."""
        if identifier in self._rows or rows.count > self.capacity:
            return
        while self.used + rows.count > self.capacity:
            _, oldest = self._rows.popitem(last=False)
            self.used -= oldest.count
        self._rows[identifier] = rows
        self.used += rows.count

    def clear(self) -> None:
        self._rows.clear()
        self.used = 0


def messages_of(
    question: int, model: str, identifier: str, rows: PromptEmbeds, most_bytes: int = MOST_BYTES
) -> Iterator[EncodedRows]:
    """Yields a part's rows in order, in messages of at most `most_bytes`."""
    together = max(1, most_bytes // rows.row_bytes)
    for first in range(0, rows.count, together):
        begin, end = first * rows.row_bytes, (first + together) * rows.row_bytes
        some = msgspec.structs.replace(rows, data=rows.data[begin:end])
        yield EncodedRows(question, model, identifier, first, some, checksum(model, identifier, first, some))
