"""`tandem replay`: shows a scheduler trace step by step.

reading   finds the steps in a trace's files by number, and reads one at a time
text        shows a step on the terminal
command     chooses the steps to show; commands: its row in the table
"""
