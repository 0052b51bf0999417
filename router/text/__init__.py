"""Between text and token ids.

tokenizer       a model's own, from its folder
segments        texts that were tokenized before, cut where that changes nothing
chat_template   messages to a prompt
special_text    text of clients that looks like a special token, made ordinary
detokenizer     ids to text, as they come
stops           stop strings, across tokens
"""
