"""How models write: their calls and their reasoning, told apart from the text of an answer while it is written.

pieces         what a text means, and the contract of everything that reads it
cursor         a place in a text that is still being written
calls          the contract of a format of calls, and the reader that is the same for all of them
json_calls, named_calls, tagged_calls, pythonic_calls, braced_calls
               five ways to write a call, each a small reader with a table's row for each family of models
json_scan, argument_lists, typed_values    where JSON and arguments end, and what values are
reasoning, harmony     what is thought before an answer; gpt-oss's channels, which are both
registry       the rows: which formats there are
detection      which of them a chat template has
plain_tools    tools for a model whose template knows none
answer_format  one model's format as a whole
lark, call_grammar     the grammars of answers that must be written so
"""
