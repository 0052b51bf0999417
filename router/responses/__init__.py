"""OpenAI's Responses API: chats as items, whose answers this router keeps for a while.

responses_request  POST /v1/responses: the request, and the chat that it is
response_maker     an answer as items, and as numbered events while it is written
response_store     answers that were asked for lately, and those that are still being written
answer_types       the answers' shapes, for the API's document
"""
