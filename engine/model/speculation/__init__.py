"""Drafts: tokens that may follow, which the next step verifies. See README.md. README.md lists the files."""
