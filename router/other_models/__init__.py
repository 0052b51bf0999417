"""Models of other deployments at one address, a wing of the router. README.md says what it is."""
