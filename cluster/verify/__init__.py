"""`tandem verify`: whether two servers give the same bits. README.md says what it is.

commands     the row of the command; command: its options, what it asks and prints
questions    what servers are asked: a built-in set, or the requests of a file
comparison   what an answer has to compare, and the first difference of two; pure
judge        asks before and during a rollout, for `tandem apply --verify`
remaking     makes an answer again by its receipt
"""
