"""The application: routes, limits, keys, error bodies, and server-sent events.

app            which path leads where
generate_routes, vector_routes, responses_routes, text_routes, status_routes, admin_routes, try_page, api_document
               what is there, each route a function; ui_routes: the cluster's page (ui.html), and what it shows; services: what all of them work with
other_models   requests for other deployments' models, passed on
realtime_routes   a conversation over a WebSocket, read ahead while it arrives; websocket: its messages, pings and end
sibling_desk   what router processes on one port tell each other of requests
response_desk  what is done with responses: begun, written, found on the nodes, cancelled
serving        the server's socket, who takes a connection from it, and its end; certificate: its TLS; door: the socket goes to other routers
protocol       one connection: its requests one after the other, its limits and its timers
call           one request, from its head on, and its answer there; chunked: a body in pieces
exchange       one request and its answer, until its client goes away; the gate that each passes on its way in and out, and how it finds its route
body, json_body    a request's body, from bytes to a checked type; what all of them take together
event_stream   an answer in one piece or as a stream; errors: as an error
"""
