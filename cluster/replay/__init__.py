"""`tandem replay`: shows a scheduler trace step by step. README.md lists the files."""
