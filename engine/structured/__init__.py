"""Structured output: answers that follow a grammar. Grammars are compiled off the step thread and applied as masks on
logits. README.md lists the files."""
