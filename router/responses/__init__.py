"""OpenAI's Responses API, a wing of the router. README.md says what it is.

wing           the routes, each handler a function
response_service  responses: begun, written, found on nodes, cancelled, forgotten
recall         background answers that other routers began, read from the nodes that keep them
sharing        responses in the other router processes on the port
"""
