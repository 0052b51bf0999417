"""OpenAI's Responses API: chats as items, whose answers the router keeps for a while.

responses_request  the request of POST /v1/responses, and the chat made from it
response_maker     an answer as items, and as numbered events while it is written
response_store     recent responses, and those that are still being written
answer_types       the answers' shapes, for the API document
"""
