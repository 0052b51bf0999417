"""Anthropic's API, a wing of the router. README.md says what it is."""
