"""Vectors of texts, and what is compared by them.

vector_request   the requests of POST /v1/embeddings, /v1/score and /v1/rerank
vectors          their plans, and the answers that are made of vectors; answer_types: the answers' shapes, for the API document
"""
