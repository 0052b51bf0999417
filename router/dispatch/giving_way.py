"""Which sequences pause so that another tenant comes to its part."""

from __future__ import annotations

from tandem.router.dispatch.slots import Slots
from tandem.router.dispatch.tenants import TenantAccounts


def pause_for(waiting: Slots, accounts: TenantAccounts, *, for_a_place: bool) -> bool:
    """Pauses sequences of tenants that hold more KV by their weight than the waiting one would with its place, and
    still would without theirs: the latest first. One for its place, or as many as have the blocks that it lacks. Returns
    whether it paused any. What is more urgent does not pause."""
    wanted = 1 if for_a_place else waiting.kv_tokens
    own = waiting.account
    load = own.load + waiting.kv_tokens / own.weight
    paused = False
    for other in sorted(accounts.here.values(), key=lambda account: account.load, reverse=True):
        for slots in reversed(list(other.requests)):
            while (
                wanted > 0
                and slots.priority >= waiting.priority
                and other.load - slots.kv_tokens / other.weight >= load
                and slots.give_way()
            ):
                paused = True
                wanted -= 1 if for_a_place else slots.kv_tokens
            if wanted <= 0:
                return True
    return paused


def take_back_prompts(waiting: Slots, accounts: TenantAccounts, most_unread: float) -> bool:
    """Pauses sequences whose prompts no node has read and that were sent while nothing was held back, the latest first,
    until no more than `most_unread` tokens are unread, or their tenant has no more than its part of these. Only of tenants
    that had more than the waiting one. Returns whether it paused any."""
    excess = accounts.unread_tokens - most_unread
    weights = sum([account.weight for account in accounts.here.values()])
    paused = False
    by_part = sorted(accounts.here.values(), key=lambda one: one.unread_tokens / one.weight, reverse=True)
    for other in by_part:
        if other.time <= waiting.account.time:
            continue
        part = most_unread * other.weight / weights
        for slots in reversed(list(other.requests)):
            while (
                excess > 0
                and slots.was_free
                and slots.unread
                and slots.priority >= waiting.priority
                and other.unread_tokens - slots.uncached_tokens >= part
                and slots.give_way(unread=True)
            ):
                paused = True
                excess -= slots.uncached_tokens
            if excess <= 0:
                return True
    return paused
