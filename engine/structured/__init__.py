"""Structured output: answers that follow a grammar. Grammars are compiled off the step thread and applied as masks on logits.

A grammar's state never leaves a node. A request's position in its grammar follows from its output tokens alone, so the decode
node continues a prefill node's first token exactly, and so do a preempted request and a failover.

grammars   one model's compiled grammars; the only file that uses the grammar library
pending    compiles grammars in threads while their requests wait
masks      which tokens each row of a step may choose, and which it must
capability gives them to every model
"""
