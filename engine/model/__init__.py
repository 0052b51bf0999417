"""The model: computes a scheduler's output and samples tokens.

loading         makes a runner from the configuration, with source, content, checkpoint, context, plain_config, gguf, leftovers, paths,
                memory and prefault
runner          the contracts of a runner and of a forward pass, and the batch that the pass gets: rows, no requests
torch_runner    the runner, with batching (the rows of requests, and batches made of them), staging and sampling/
eagle           drafts from an EAGLE head, which reads the model's hidden states; eagle_loading loads it
draft_model     drafts from a small model, or from the text itself; draft_loading loads it, or says why it does not fit
pooling, pooler which vectors a model makes, and how a prompt's chunks become one; hidden_states writes hidden states to files
native/         the Llama family on CPUs, in C++
general, probe, check, attention/, transformers_forward
                the general path: transformers' models with our paged attention, checked before they serve; caches has the
                objects that stand in for transformers' cache
recurrent/      layers of the general path that keep a state instead of keys and values
quantized/      quantized matrices
vision/         vision towers
lora/           LoRA adapters, several in one batch
wide/           the general path on several ranks
fused/          the general path with fewer, larger operations
decode_graphs, decode_inputs
                steps recorded once per shape and replayed, on devices; recorded_steps and tape do so on CPUs
"""
