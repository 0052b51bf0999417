"""Paged attention for any transformers model, which calls it through transformers' attention interface.

interface            the function that a model's layers call, and the contract of all kinds of attention
layers               what one layer computes, and where its KV is in the cache
gathered, kernel     gathers a request's blocks, and attends with torch
"""
