"""A prompt's chunk computed by several ranks, each some of its rows (context parallel). README.md lists the files."""
