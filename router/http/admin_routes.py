"""POST /admin/..., and vLLM's two paths for adapters: what an operator does to the cluster. The router passes
actions on; the controller knows what they mean."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from tandem.api.openai.mistakes import explain
from tandem.base.errors import InvalidRequest, RequestError, Unavailable
from tandem.router.http.body import read_bytes
from tandem.router.http.errors import Forbidden
from tandem.router.http.exchange import HttpExchange, send_bytes
from tandem.router.http.services import ClusterControl, Services

T = TypeVar("T")


class UnknownAdapter(RequestError):
    code = "not_found"
    http_status = 404


class LoadAdapter(msgspec.Struct, frozen=True):
    """The body that vLLM's clients send."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapter(msgspec.Struct, frozen=True):
    lora_name: str


async def admin(services: Services, exchange: HttpExchange) -> None:
    control, body = await _asked(services, exchange, "/admin")
    action = exchange.scope["path_params"]["action"]
    exchange.notes += f" action={action[:40]!r}"
    await send_bytes(exchange.send, await control.act(action, body), b"application/json")


async def reset_cache(services: Services, exchange: HttpExchange) -> None:
    """The action `reset_prefix_cache` under the paths of vLLM and SGLang."""
    control, _ = await _asked(services, exchange, exchange.route)
    await send_bytes(exchange.send, await control.act("reset_prefix_cache", b"{}"), b"application/json")


async def load_adapter(services: Services, exchange: HttpExchange) -> None:
    """The action `adapters` in vLLM's form, in which an adapter's folder stands for its content."""
    control, body = await _asked(services, exchange, "/v1/load_lora_adapter")
    asked = _decoded(body, LoadAdapter)
    known = _places(await control.act("adapters", b""))
    if asked.lora_name in known and not asked.load_inplace:
        raise InvalidRequest(
            f"the adapter {asked.lora_name!r} is loaded already: set load_inplace to put another one in its place",
            "lora_name",
        )
    if known.get(asked.lora_name) == asked.lora_path:
        raise InvalidRequest(
            f"the adapter {asked.lora_name!r} was loaded from this folder: put the new one into another folder, or unload it first",
            "lora_path",
        )
    await _change(control, {"load": {asked.lora_name: asked.lora_path}})
    said = f"Success: LoRA adapter '{asked.lora_name}' added successfully."
    await send_bytes(exchange.send, said.encode(), b"text/plain; charset=utf-8")


async def unload_adapter(services: Services, exchange: HttpExchange) -> None:
    control, body = await _asked(services, exchange, "/v1/unload_lora_adapter")
    asked = _decoded(body, UnloadAdapter)
    known = _places(await control.act("adapters", b""))
    if asked.lora_name not in known:
        there = ", ".join(sorted(known)) or "none"
        raise UnknownAdapter(f"there is no adapter {asked.lora_name[:200]!r}; there are: {there}")
    await _change(control, {"unload": [asked.lora_name]})
    said = f"Success: LoRA adapter '{asked.lora_name}' removed successfully."
    await send_bytes(exchange.send, said.encode(), b"text/plain; charset=utf-8")


async def _asked(services: Services, exchange: HttpExchange, door: str) -> tuple[ClusterControl, bytes]:
    """Checks that an operator asks. Where no key is set, nothing is allowed: the cluster is then changed from
    its own machines."""
    if not services.keys.required:
        raise Forbidden(f"{door} needs an operator's key, and this router has no keys: set one in router.api_keys")
    exchange.require_operator(services.keys)
    if services.control is None:
        raise Unavailable("this router belongs to no cluster that could be changed")
    with services.bodies.share() as share:
        return services.control, bytes(await read_bytes(exchange, services.config, share))


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise explain(str(error), kind, value) from None


def _places(answer: bytes) -> dict[str, str]:
    return msgspec.json.decode(answer, type=dict[str, dict[str, str]])["adapters"]


async def _change(control: ClusterControl, asked: dict[str, object]) -> None:
    await control.act("adapters", msgspec.json.encode(asked))
