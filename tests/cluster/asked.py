"""Clusters of tests, as commands use them."""

from __future__ import annotations

from typing import Any, TypeVar

from tandem.cluster.orders import Order

T = TypeVar("T")


class Asked:
    """Carries out an order by the method that a controller has for it."""

    async def ask(self, order: Order[T]) -> T:
        control: Any = self
        return await order.do(control)
