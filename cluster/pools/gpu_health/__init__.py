"""Replaces nodes whose card must not compute any more. README.md lists the files."""
