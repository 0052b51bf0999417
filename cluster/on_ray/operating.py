"""The door to the controller that a router holds open for operators."""

from __future__ import annotations

import asyncio

from tandem.cluster.admin import act


class RayControl:
    """Implements `router.http.admin_routes.ClusterControl`. The controller is looked for each time: it may be another one by now."""

    async def act(self, action: str, body: bytes) -> bytes:
        # Imported when an operator comes: it takes long, and a router has other things to do.
        from tandem.cluster.on_ray.remote_controller import the_controller

        return await act(await asyncio.to_thread(the_controller), action, body)
