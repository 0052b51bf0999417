"""Envoy's messages for external processing, as far as the picker reads and writes them: `envoy.service.ext_proc.v3` and what that uses.
The packages that have all of Envoy's bring files of OpenTelemetry's packages along, and overwrite them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

DUPLEX = 4  # a mode of bodies: FULL_DUPLEX_STREAMED
OVERWRITE = 2  # an action on a header: OVERWRITE_IF_EXISTS_OR_ADD

_Field = descriptor_pb2.FieldDescriptorProto
_TYPES = {"bytes": _Field.TYPE_BYTES, "string": _Field.TYPE_STRING, "bool": _Field.TYPE_BOOL, "int": _Field.TYPE_INT32}
_STRUCT = struct_pb2.Struct.DESCRIPTOR
# By message and field: its number and its type. An enumeration is a number on the wire, and a map a list of pairs.
_FIELDS: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "HeaderValue": {"key": (1, "string"), "value": (2, "string"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, "HeaderValue*")},
    "HttpHeaders": {"headers": (1, "HeaderMap")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {},
    "MetadataPair": {"key": (1, "string"), "value": (2, "Struct")},
    "Metadata": {"filter_metadata": (1, "MetadataPair*")},
    "ProtocolConfiguration": {"request_body_mode": (1, "int"), "response_body_mode": (2, "int")},
    "ProcessingRequest": {
        "request_headers": (2, "HttpHeaders"),
        "response_headers": (3, "HttpHeaders"),
        "request_body": (4, "HttpBody"),
        "response_body": (5, "HttpBody"),
        "request_trailers": (6, "HttpTrailers"),
        "response_trailers": (7, "HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "observability_mode": (10, "bool"),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int")},
    "HeaderMutation": {"set_headers": (1, "HeaderValueOption*")},
    "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "BodyMutation": {"streamed_response": (3, "StreamedBodyResponse")},
    "CommonResponse": {"header_mutation": (2, "HeaderMutation"), "body_mutation": (3, "BodyMutation")},
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "BodyResponse": {"response": (1, "CommonResponse")},
    "TrailersResponse": {},
    "HttpStatus": {"code": (1, "int")},
    "ImmediateResponse": {
        "status": (1, "HttpStatus"), "headers": (2, "HeaderMutation"), "body": (3, "bytes"), "details": (5, "string"),
    },
    "ProcessingResponse": {
        "request_headers": (1, "HeadersResponse"),
        "response_headers": (2, "HeadersResponse"),
        "request_body": (3, "BodyResponse"),
        "response_body": (4, "BodyResponse"),
        "request_trailers": (5, "TrailersResponse"),
        "response_trailers": (6, "TrailersResponse"),
        "immediate_response": (7, "ImmediateResponse"),
        "dynamic_metadata": (8, "Struct"),
    },
}  # fmt: skip


def _made() -> dict[str, Any]:
    package = "tandem.picker"
    file = descriptor_pb2.FileDescriptorProto(
        name="tandem/picker.proto", package=package, syntax="proto3", dependency=[_STRUCT.file.name]
    )
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field, (number, text) in fields.items():
            of = text.removesuffix("*")
            made = message.field.add(name=field, number=number, type=_TYPES.get(of, _Field.TYPE_MESSAGE))
            made.label = _Field.LABEL_OPTIONAL if of == text else _Field.LABEL_REPEATED
            if of not in _TYPES:
                made.type_name = f".{_STRUCT.full_name}" if of == "Struct" else f".{package}.{of}"
    pool = descriptor_pool.Default()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in _FIELDS}


_MADE = _made()
BodyMutation: Any = _MADE["BodyMutation"]
BodyResponse: Any = _MADE["BodyResponse"]
CommonResponse: Any = _MADE["CommonResponse"]
HeaderMap: Any = _MADE["HeaderMap"]
HeaderMutation: Any = _MADE["HeaderMutation"]
HeadersResponse: Any = _MADE["HeadersResponse"]
HeaderValue: Any = _MADE["HeaderValue"]
HeaderValueOption: Any = _MADE["HeaderValueOption"]
HttpBody: Any = _MADE["HttpBody"]
HttpHeaders: Any = _MADE["HttpHeaders"]
HttpStatus: Any = _MADE["HttpStatus"]
HttpTrailers: Any = _MADE["HttpTrailers"]
ImmediateResponse: Any = _MADE["ImmediateResponse"]
Metadata: Any = _MADE["Metadata"]
ProcessingRequest: Any = _MADE["ProcessingRequest"]
ProcessingResponse: Any = _MADE["ProcessingResponse"]
ProtocolConfiguration: Any = _MADE["ProtocolConfiguration"]
StreamedBodyResponse: Any = _MADE["StreamedBodyResponse"]
TrailersResponse: Any = _MADE["TrailersResponse"]
