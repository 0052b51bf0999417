"""Encoder nodes, from the side of the nodes that compute prompts.

part    asks for the rows of the images in this node's requests
client  the questions to encoder nodes, their deadlines, and the checks of their answers
"""
