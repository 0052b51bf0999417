"""Encoder nodes: an image's rows are made once, for every node that reads prompts.

rows   the cache of them, and how they are cut into messages
node   questions in, rows out, an honest status
"""
