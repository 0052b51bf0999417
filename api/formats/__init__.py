"""How models write tool calls and reasoning, and how both are told apart from an answer's text while it is
written.

joined         what the API's core takes of this package
cursor         a position in a text that is still being written
calls          the contract of a call format, and the reader that all of them share
json_calls, named_calls, tagged_calls, pythonic_calls, braced_calls
               five ways to write a call, each a small reader with settings for each family of models
json_scan, argument_lists, typed_values    where JSON and arguments end, and the types of values
reasoning, harmony     reasoning before an answer; gpt-oss's channels, for both reasoning and calls
registry       the table of known formats
detection      which format a chat template uses
plain_tools    tools for a model whose template has none
answer_format  one model's whole format
call_grammar   grammars for answers with calls
"""
