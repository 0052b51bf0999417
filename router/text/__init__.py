"""Between text and token ids.

tokenizer       a model's own, from its folder
segments        texts and words that were tokenized before, cut where that changes nothing
chat_template   messages to a prompt; clients' text that looks like a special token is made ordinary
detokenizer     ids to text, as they come; stop strings, across tokens
"""
