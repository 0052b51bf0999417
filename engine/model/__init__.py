"""What turns a scheduler's output into tokens.

loading         from configuration to a runner: source, content, checkpoint, plain_config, gguf, leftovers, paths, memory,
                prefault
runner          the contracts of runner and forward pass, and the batch that the pass gets: rows, no requests; torch_runner keeps
                it: states, batching, staging, sampling/
eagle           guesses by a head that reads the model's hidden states; eagle_loading loads it
draft_model     guesses by a small model beside the other, or from the text itself; draft_loading loads it, or says why it cannot guess
pooling, pooler which vectors the model makes, and how chunks come to one; hidden_states writes them to files, whole
native/         the Llama family on CPUs, in C++
general, probe, check, attention/, transformers_forward
                everything else: transformers' models over our paged attention, checked before they serve; caches are
                what their code gets in place of its own cache, and of the whole step
recurrent/      of those, the modules that keep a state in place of keys and values
quantized/      matrices of fewer bits
vision/         of models that read images, the towers that encode them
lora/           low-rank updates of its linear layers, many in one batch
wide/           the same models on several ranks
fused/          the same models with fewer, larger operations
decode_graphs, decode_inputs
                steps recorded once per shape and replayed, on devices; recorded_steps and tape: on CPUs
"""
