"""Anthropic's API: its requests become chats, and its answers are made from a chat's.

messages_request   the request of POST /v1/messages, and the chat made from it
messages_answer    the answer, whole or as a stream of events; answer_types: its shapes, for the API document
"""
