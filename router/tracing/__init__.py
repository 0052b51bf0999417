"""Where a request's time went, from its first byte in to its last token out. README.md lists the files."""
