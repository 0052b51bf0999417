"""The OpenAI API: its request types and their checks, sampling, and the answers, streamed or whole.

fields, chat_request, completion_request, text_request
               the requests' fields
mistakes       what is wrong with a field, in plain words
served_model   what a router serves: names, tokenizer, template, formats; caller: who asks
prompts        texts and token ids, checked and tokenized
chat_prompt
               a chat's messages, as the model's template takes them, and their prompt
sampling, grammars
               from a request to sampling parameters, and to the one grammar that its fields make; grammar_check: the process that
               checks grammars
plan           from a checked request to a generation_plan: what is generated, how it is read, and what it used
answer         one choice as its tokens arrive, and what all answers share; reading: a generation read to its end
chat_answer, completion_answer, logprobs
               how answers are written; answer_types: their shapes, for the API document
"""
