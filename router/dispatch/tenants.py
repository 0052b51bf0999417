"""The tenants that use the pools now, and what those that come begin with."""

from __future__ import annotations

from collections.abc import Callable

from tandem.router.dispatch.slots import TenantAccount

# A tenant that asks one request after the other is away for moments. Others' prompts are not all let go in each of them.
STAYS_S = 5.0


class TenantAccounts:
    """The accounts of all tenants that ever came; there are as many as keys.

    A tenant is here while it waits or holds a place. One that comes starts where that tenant is that has had
    least of those that are here, so it saves no credit while it is away; what it had too much of, it still owes.
    """

    def __init__(self, weight_of: Callable[[str], float], clock: Callable[[], float]) -> None:
        self._weight_of = weight_of
        self._clock = clock
        self._accounts: dict[str, TenantAccount] = {}
        self.here: dict[str, TenantAccount] = {}
        self._least = 0.0  # the same when a tenant last left
        self._several_until = 0.0

    def of(self, name: str) -> TenantAccount:
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = TenantAccount(name, self._weight_of(name))
        return account

    def come(self, account: TenantAccount) -> None:
        """It is about to wait or to hold a place. Idempotent."""
        if account.name not in self.here:
            account.time = max(account.time, self._had_least())
            self.here[account.name] = account

    def leave(self, account: TenantAccount) -> None:
        """Called when it has a place or a sequence in line less."""
        if account.held or account.in_line or account.name not in self.here:
            return
        self._least = max(self._least, self._had_least())
        if len(self.here) > 1:
            self._several_until = self._clock() + STAYS_S
        del self.here[account.name]

    def _had_least(self) -> float:
        """The least virtual time, without what is charged and not yet read: that may come back."""
        times = [each.time - each.unread_tokens / each.weight for each in self.here.values()]
        return min(times, default=self._least)

    @property
    def are_several(self) -> bool:
        """Whether more than one tenant uses the pools, or did a moment ago."""
        return len(self.here) > 1 or (self._several_until > 0.0 and self._clock() < self._several_until)

    def settle(self) -> None:
        """Charges the tokens of all answers that have come."""
        for account in self.here.values():
            for slots in account.requests:
                slots.settle()

    @property
    def unread_tokens(self) -> float:
        return sum([account.unread_tokens for account in self.here.values()])
