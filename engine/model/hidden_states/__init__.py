"""Hidden states of prompts, in files: see README.md. README.md lists the files."""
