"""By when a request's first token comes, with a stated confidence. README.md lists the files."""
