"""Between text and token ids.

tokenizer       a model's tokenizer, from its folder
segment_cache, word_cache
                what was tokenized before: texts are cut only where that changes no ids
detokenizer     token ids to text, as they arrive
tenant_cache    a cache in which no tenant finds what another put in
chat_template   messages to a prompt; keeps clients' text from being read as special tokens
"""
