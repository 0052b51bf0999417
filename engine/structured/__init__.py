"""Answers that follow a grammar: compiled off the step thread, applied to logits, rebuilt from the tokens alone.

No state of a grammar ever leaves a node. Where a request stands in its grammar follows from its output tokens, so a
prefill node's first token, the decode node after it, a preemption and a failover all continue exactly.

grammars   one model's compiled grammars; the one seam to the library
desk       requests that wait until theirs is compiled
masks      which tokens each row of a step may choose
"""
