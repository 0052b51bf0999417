"""Between text and token ids: tokenizer, chat template, incremental detokenization, stop strings."""
