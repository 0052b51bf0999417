"""Between text and token ids.

tokenizer       a model's own, from its folder; texts and words that it tokenized before, cut where that changes nothing
chat_template   messages to a prompt; clients' text that looks like a special token is made ordinary
detokenizer     ids to text, as they come; stop strings, across tokens
"""
