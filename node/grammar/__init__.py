"""Answers that follow a grammar, at a node.

part    has grammars compiled while their requests wait
"""
