"""OpenAI's files and batches, a wing of the router. README.md lists the files."""
