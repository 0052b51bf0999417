"""What a request means, and how its answer is written: the HTTP APIs without HTTP, nodes or pools.

Floor 2: it imports wire and base. It makes plans (`SequenceSpec`) of checked requests, and answers of what others
generate (`ReadableLives`).

    settings    what an operator may set of it
    json_body   a request's body, from bytes to a checked type
    field_table     which fields each path obeys, takes without effect, and refuses
    sequence    one sequence that a request asks for
    lives       a generation as its reader sees it
    logprob_store   the log-probabilities of an answer's tokens
    pieces      the meanings of an answer's text, and the contract of its readers
    answer_format   how one model writes its answers: the contract of formats
    lark        parts of grammars
    openai/     the OpenAI API: its request types, their checks, and the answers
    text/       tokenizer, chat template, incremental detokenization, stop strings

What joins by the table in wings:

    formats/    how models write calls and reasoning, told apart from an answer's text
    images/     images in messages: their checks, and their places in a prompt
    prompt_embeds/  prompts as tensors, read from their files without torch or an unpickler

What the router's paths import:

    responses/  OpenAI's Responses API, and the answers that are kept for it
    anthropic/  Anthropic's API for the same chats
    batches/    files of requests, and the jobs made of them
    vectors/    vectors of texts, and what is compared by them
    realtime/   OpenAI's realtime events: a conversation whose prompt may arrive in parts
"""
