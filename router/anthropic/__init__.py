"""Anthropic's API, as another way to ask for a chat: what it says is turned into our own request and back.

messages_request   POST /v1/messages: the request, and the chat that it is
messages_answer    the answer, whole or as a stream of events; answer_types: its shapes, for the API's document
"""
