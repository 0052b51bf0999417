"""Drafts: tokens that may follow, which the next step verifies. See README.md.

capability      which kind of drafts a load asks for
text            drafts from the text itself
draft_model     drafts from a small model with the same tokenizer
draft_loading   loads `model.draft`, or says why it does not fit
eagle           drafts from an EAGLE head, which reads the model's hidden states
eagle_loading   loads the head
mtp             loads the head that the model's own checkpoint has
"""
