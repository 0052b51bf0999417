"""GET /v1/realtime, a wing of the router. README.md says what it is."""
