"""GGUF files. README.md lists the files."""
