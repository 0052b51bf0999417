"""The OpenAI API: its request types and their checks, sampling, and the answers, streamed or whole.

fields, chat_request, completion_request, text_request
               the requests' fields
mistakes       what is wrong with a field, in plain words
prompts        what this router serves; how texts, token ids and chats become prompts, by its model's tokenizer and template
sampling       from a request to sampling parameters, and to the one grammar that its fields make, checked
plan           a checked, tokenized request: what is to be generated, how it is read, and what it used
answer         one choice as its tokens arrive, and what all answers share; reading: a generation read to its end
chat_answer, completion_answer, logprobs
               how answers are written; answer_types: their shapes, for the API document
"""
