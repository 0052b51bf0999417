"""Encoder nodes: encode each image once for all nodes that compute prompts.

rows   caches the rows of images, and cuts them into messages
node   answers questions for rows, and reports its status
"""
