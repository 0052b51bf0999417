"""Receipts of answers, a wing of the router. README.md says what it is."""
