"""Clusters of tests, as commands use them."""

from __future__ import annotations

from typing import Any, TypeVar

from tandem.cluster.orders import Control, Order

T = TypeVar("T")


class DirectCluster:
    """Carries out an order by the method that a controller has for it."""

    async def ask(self, order: Order[T]) -> T:
        control: Any = self
        return await order.do(control)


class DirectController(DirectCluster):
    """The same for a controller that is not a cluster of its own."""

    def __init__(self, control: Control) -> None:
        self._control = control

    async def ask(self, order: Order[T]) -> T:
        return await order.do(self._control)
