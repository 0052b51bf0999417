"""Images in a chat's messages: from a data URL to a checked file, and to the placeholders that stand for it in the
prompt. README.md lists the files."""
