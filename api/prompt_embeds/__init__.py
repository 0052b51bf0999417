"""Prompts given as tensors of embeddings.

reading     from base64 of a tensor's file to rows that a node takes
"""
