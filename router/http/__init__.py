"""The application: routes, limits, keys, error bodies, and server-sent events.

app            which path leads where
generate_routes, text_routes, status_routes, trace_routes, try_page, api_document
               what is there; services: what all of it works with
serving, protocol, disconnect
               uvicorn in somebody else's event loop, with limits before any application; a client that goes away
gate           what every request passes on its way in and out
body, json_body    a request's body, from bytes to a checked type; memory: what all of them take together
respond, event_stream, errors
               an answer in one piece, as a stream, as an error
"""
