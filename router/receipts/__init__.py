"""Answers that are made again: receipts, and clients' requests during a rollout. A wing of the router; README.md says what it is.

receipt   what is needed to make an answer again, and digests by which the same one is known; pure
wing      checks a request's receipt, and signs an answer's
live      asks requests again that old nodes have answered, at an operator's request
"""
