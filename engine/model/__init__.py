"""The model: computes a scheduler's output and samples tokens.

loading         makes a runner from the configuration, with source, content, tensor_files, checkpoint, context, plain_config,
                leftovers, paths, weight_formats, memory and prefault; loaded has what a load gives
capabilities    what a model may be loaded with; wings has the table of them
runner          the contracts of a runner and of a forward pass, and the batch that the pass gets: rows, no requests
torch_runner    the runner, with batching (the rows of requests, and batches made of them), staging and sampling/; its optional parts
                are parts, and embeds is the one for rows that a request brought
adapter_book    which LoRA adapters a node has, whatever its engine; peft_folder reads one as PEFT writes it,
                peft_patterns tries its regular expressions
adapters        the contract of LoRA adapters with fused layers
shard           this process's rank, and the collectives that reach the other ranks
observed        the hidden states that some wings read
native/         the Llama family on CPUs, in C++
general, probe, check, attention/, transformers_forward
                the general path: transformers' models with our paged attention, checked before they serve; caches has the
                objects that stand in for transformers' cache
own_attention/  layers of the general path that attend by their own code; own_layers is their contract
latents/        layers of the general path that keep one latent for all heads; compressed is their contract
recurrent/      layers of the general path that keep a state instead of keys and values; states is their contract
crossed/        models with an encoder and a decoder
quantized/      quantized matrices; fused layers know theirs as kernel_linear
gguf/           GGUF files
vision/         vision towers; encoder nodes know them by lone_tower
vectors/        vectors of prompts
hidden_states/  prompts' hidden states, in files
speculation/    drafts from the text, from a small model or from an EAGLE head
lora/           LoRA adapters, several in one batch
work/           what a token costs, by estimate
wide/           the general path on several ranks
divided/        prompts that several ranks read together
fused/          the general path with fewer, larger operations; pieces and sums are their contract
cuda/           what a CUDA device adds to the general path
exact/          the same bits, required
"""
