"""Answers that are made again: receipts, and clients' requests during a rollout. A wing of the router; README.md lists
the files."""
