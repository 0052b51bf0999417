"""The OpenAI API: its request types and their checks, sampling, and the answers, streamed or whole.

fields, chat_request, vector_request; prompts has the completions' request
               what may be asked
prompt_embeds  prompts as tensors, read from their files without torch or an unpickler
prompts        what this router serves, and what requests' prompts come to by its model's tokenizer and template, a chat's messages too
sampling       from a request to what nodes are told, and what crosses several fields; the one grammar that they add up to, checked
plan           a checked request, tokenized: what is to be generated
choice, reading    one choice as its tokens come; a generation read to its end
vectors        the same for vectors and scores: what nodes are asked for, and the answers
answer, chat_answer, completion_answer, logprobs
               what is answered; answer_types: its shapes, for the API's document
"""
