"""Replaces nodes whose card must not compute any more.

wing   looks at what nodes report, and orders their replacement
"""
