"""How long drafts may be, at the scheduler. README.md lists the files."""
