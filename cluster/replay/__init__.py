"""`tandem replay`: a scheduler trace, step by step.

reading   the steps in a trace's files, found by number and read one at a time
text        a step on the terminal
command     which of them are shown
"""
