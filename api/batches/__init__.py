"""What a batch means: files of lines, the jobs made of them, and their answers. router/batches/ does the work.

answer_types   the answers' shapes
batch_request  what a request for a batch says
lines          one line of an input file, and the lines of output and error files
messages       Anthropic's message batches in the same terms
"""
