"""OpenAI's Responses API, a wing of the router. README.md lists the files."""
