"""The endpoint picker's side of Envoy's external processing: one stream for each request, from its headers to the end of its answer.

The gateway is told the router in a header and in metadata, which must not differ. Bodies are not looked at. Where the gateway has them
pass through here (`FULL_DUPLEX_STREAMED`, which the inference extension asks for), each piece is sent back as it came.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf import struct_pb2, wrappers_pb2

from tandem.cluster.picker import messages
from tandem.cluster.picker.choice import RouterChoice
from tandem.cluster.picker.known_routers import KnownRouters

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
CHOSEN = "x-gateway-destination-endpoint"
_LARGEST = 64 << 20  # a gateway that buffers a body sends it as one message
_KINDS = tuple(f"{side}_{part}" for side in ("request", "response") for part in ("headers", "body", "trailers"))
_SERVING, _NOT_SERVING = 1, 2  # in gRPC's health protocol


class Picker:
    def __init__(self, routers: KnownRouters, choice: RouterChoice) -> None:
        self._routers = routers
        self._choice = choice

    def server(self) -> grpc.aio.Server:
        """Not started, and without a port."""
        process = grpc.stream_stream_rpc_method_handler(
            self.process, messages.ProcessingRequest.FromString, messages.ProcessingResponse.SerializeToString
        )
        # Health messages have one field each, and are on the wire what these are.
        check = grpc.unary_unary_rpc_method_handler(
            self._check, wrappers_pb2.StringValue.FromString, wrappers_pb2.Int32Value.SerializeToString
        )
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", _LARGEST),
                ("grpc.max_send_message_length", _LARGEST),
                ("grpc.so_reuseport", 0),  # else a second picker takes half of the gateway's connections
            ]
        )
        server.add_generic_rpc_handlers((
            grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),
            grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check}),
        ))  # fmt: skip
        return server

    async def process(self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        duplex = {"request_body": False, "response_body": False}
        chosen = ""
        try:
            async for request in requests:
                if request.HasField("protocol_config"):
                    config = request.protocol_config
                    duplex["request_body"] = config.request_body_mode == messages.DUPLEX
                    duplex["response_body"] = config.response_body_mode == messages.DUPLEX
                kind = next(filter(request.HasField, _KINDS), None)
                if kind is None or request.observability_mode:
                    continue
                if kind == "request_headers":
                    if (found := self._pick(request)) is None:
                        yield self._refusal()
                        return
                    chosen = found
                    self._choice.begin(chosen)
                    yield _sent_to(chosen)
                elif kind.endswith("_headers"):
                    yield _response(kind, messages.HeadersResponse())
                elif kind.endswith("_trailers"):
                    yield _response(kind, messages.TrailersResponse())
                else:
                    yield _response(
                        kind, _passed_on(getattr(request, kind)) if duplex[kind] else messages.BodyResponse()
                    )
        finally:
            if chosen:
                self._choice.end(chosen)

    def _pick(self, request: Any) -> str | None:
        headers = {one.key: one.raw_value or one.value.encode() for one in request.request_headers.headers.headers}
        allowed = _subset(request.metadata_context.filter_metadata)
        ready = self._routers.ready
        owner = headers.get("authorization") or headers.get("x-api-key") or b""
        path = headers.get(":path", b"").decode("utf-8", "replace")
        return self._choice.pick(ready if allowed is None else [one for one in ready if one in allowed], path, owner)

    def _refusal(self) -> Any:
        if self._routers.ready:
            why = "the gateway allows none of the routers that take requests"
        else:
            why = f"no router takes requests: {self._routers.why_none}"
        body = {"error": {"message": why, "type": "server_error", "param": None, "code": "unavailable"}}
        mutation = messages.HeaderMutation(
            set_headers=[_header("content-type", "application/json"), _header("retry-after", "1")]
        )
        return messages.ProcessingResponse(
            immediate_response=messages.ImmediateResponse(
                status=messages.HttpStatus(code=503),
                headers=mutation,
                body=json.dumps(body).encode(),
                details="no_router",
            )
        )

    async def _check(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        if request.value not in ("", "liveness", "readiness", SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.value[:100]!r}")
        lives = request.value == "liveness" or self._routers.has_looked
        return wrappers_pb2.Int32Value(value=_SERVING if lives else _NOT_SERVING)


def _subset(metadata: Any) -> set[str] | None:
    """The addresses that the gateway allows; None: all."""
    hint = next((one.value for one in metadata if one.key == "envoy.lb.subset_hint"), None)
    if hint is None or f"{CHOSEN}-subset" not in hint:
        return None
    told = hint[f"{CHOSEN}-subset"]
    return {one.strip() for one in (told.split(",") if isinstance(told, str) else told)}


def _header(name: str, value: str) -> Any:
    return messages.HeaderValueOption(
        header=messages.HeaderValue(key=name, raw_value=value.encode()), append_action=messages.OVERWRITE
    )


def _sent_to(router: str) -> Any:
    # Never several, which the protocol allows: a gateway that reads the header as one address would refuse them.
    metadata = struct_pb2.Struct()
    metadata.update({"envoy.lb": {CHOSEN: router}})
    response = messages.CommonResponse(header_mutation=messages.HeaderMutation(set_headers=[_header(CHOSEN, router)]))
    return messages.ProcessingResponse(
        request_headers=messages.HeadersResponse(response=response), dynamic_metadata=metadata
    )


def _passed_on(piece: Any) -> Any:
    same = messages.StreamedBodyResponse(body=piece.body, end_of_stream=piece.end_of_stream)
    return messages.BodyResponse(
        response=messages.CommonResponse(body_mutation=messages.BodyMutation(streamed_response=same))
    )


def _response(kind: str, body: Any) -> Any:
    return messages.ProcessingResponse(**{kind: body})
