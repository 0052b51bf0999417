"""Encoder nodes: encode each image once for all nodes that compute prompts.

node      loads a vision tower, and serves
service   answers questions for rows, and reports its status
rows      caches the rows of images, and cuts them into messages
"""
