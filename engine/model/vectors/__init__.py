"""Vectors of prompts: see README.md.

capability  whether a model makes vectors
pooling     which vectors, by `model.pooling` or the checkpoint's files
pooler      makes one vector of a prompt's chunks
"""
