"""The router's HTTP application: routes, keys, error bodies, and server-sent events. `http_server` serves it.

app            which path leads to which handler
generate_routes, text_routes, status_routes, admin_routes, try_page, api_document
               the paths, each handler a function; status_routes: also the cluster's page (ui.html) and its data; services: what all handlers work with
other_paths    paths of other servers and mistyped ones: what a 404 says, and what is answered
operation      one method at one path, as the API document has it
page_figures   the page's figures of this process, and of all on its port
answer_notes   what the log and an answer's headers say of its nodes
exchange       one request and its answer, as handlers and the log see them, sent whole or as a stream; the gate that each passes; the lookup of
               its route
body           a request's body, from bytes to a checked type; limits on the memory of all requests together
request_fields the paths whose bodies are read, for the table of their fields
hosts          by which names a router without keys may be asked
rendering      one rendering of a costly answer for all who ask
errors         every error's body, status and headers
"""
