"""How models write tool calls and reasoning, and how both are told apart from an answer's text while it is written.
README.md lists the files."""
