"""Encoder nodes: encode each image once for all nodes that compute prompts.

node      loads a vision tower, and serves
service   answers questions for rows, and reports its status
actor     the node as a Ray actor
role      what a cluster does for it
rows      caches the rows of images, and cuts them into messages
"""
