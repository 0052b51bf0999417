"""How far our own forward passes have brought the prompts that are being sent."""

from __future__ import annotations

from collections.abc import Callable

from tandem.kvtransfer.protocol import commands
from tandem.kvtransfer.protocol.ledger import Ledger
from tandem.kvtransfer.protocol.sending import Phase, Sending
from tandem.kvtransfer.protocol.writing import Writer


class Progress:
    """`advanced` is called with a transfer of which more may be written now."""

    def __init__(
        self,
        ledger: Ledger,
        writer: Writer,
        *,
        to_write: bool,
        has_windows: bool,
        advanced: Callable[[Sending], None],
    ) -> None:
        self._ledger = ledger
        self._writer = writer
        self._to_write = to_write
        # With windows, blocks may have been given up without a word: only the table at the end tells.
        self._owned_until_computed = not has_windows
        self._advanced = advanced
        # Of forward passes that the device has been given and has not finished.
        self._unfenced: list[commands.Computed | commands.LayersComputed] = []

    @property
    def waits_for_device(self) -> bool:
        return bool(self._unfenced)

    def take(self, command: commands.Computed | commands.LayersComputed) -> None:
        if command.fence is not None and not command.fence():
            self._unfenced.append(command)
        elif isinstance(command, commands.Computed):
            self._computed(command)
        else:
            self._computing(command)

    def look_at_device(self) -> None:
        unfenced, self._unfenced = self._unfenced, []
        for command in unfenced:
            self.take(command)

    def preempted(self, command: commands.Preempted) -> None:
        for unfenced in self._unfenced:
            for request_id in command.request_ids:
                unfenced.num_tokens.pop(request_id, None)
        for request_id in command.request_ids:
            sending = self._ledger.of_request(request_id)
            if sending is not None:
                sending.taint(command.at)

    def _computed(self, command: commands.Computed) -> None:
        for request_id, num_tokens in command.num_tokens.items():
            sending = self._ledger.of_request(request_id)
            if sending is not None and sending.source is not None:
                source = sending.source
                source.computed = max(source.computed, num_tokens)
                if self._owned_until_computed:
                    source.owned_until = max(source.owned_until, command.at)
                self._writer.computed(sending)
                self._advanced(sending)
                if source.computed >= source.plan.num_tokens and source.fully_computed_at is None:
                    source.fully_computed_at = command.at

    def _computing(self, command: commands.LayersComputed) -> None:
        for request_id, num_tokens in command.num_tokens.items():
            sending = self._ledger.of_request(request_id)
            if sending is not None and sending.phase is Phase.OPEN and self._to_write:
                self._writer.computing(sending, num_tokens, command.slots)
                self._advanced(sending)
