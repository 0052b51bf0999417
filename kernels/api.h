// The C interface: what Python calls through ctypes. `library.py` mirrors every struct and function of it.
//
// A function that can fail returns 0, or a negative number with the reason in tandem_error() of the same thread.
// One thread at a time may use a model.
#pragma once

#include <stdint.h>

#define TANDEM_API extern "C" __attribute__((visibility("default")))

struct tandem_spec {
  int32_t layers;
  int32_t hidden;
  int32_t intermediate;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t vocab;
  int32_t dtype;    // tandem::Dtype of weights, activations and cache
  int32_t qk_norm;  // 1: Q and K are normalised per head
  float eps;
};

// Rows of a checkpoint's matrix, or elements of its vector. Matrices may be in blocks (elements.h).
struct tandem_part {
  const void* data;
  int64_t rows;
  int32_t dtype;
};

// Per layer: group and slot in the cache, and the window (0: unlimited).
struct tandem_cache {
  void* data;  // [blocks, slots, 2, kv_heads, block_size, head_dim]
  int64_t blocks;
  int32_t slots;
  int32_t block_size;
  const int32_t* layer_group;
  const int32_t* layer_slot;
  const int32_t* layer_window;
  int32_t groups;
};

struct tandem_batch {
  int32_t tokens;
  int32_t requests;
  const int64_t* token_ids;
  const int64_t* positions;
  const int32_t* query_start;
  const int32_t* context_lens;
  const int64_t* const* slot_mapping;   // per group
  const int32_t* const* block_tables;   // per group
  const int64_t* block_table_strides;   // per group
  const int64_t* logit_rows;
  int32_t num_logit_rows;
  // The rows that replace their tokens' embeddings, and their values: [num_given_rows, hidden].
  const int64_t* given_rows;
  const float* given;
  int32_t num_given_rows;
};

// Which matrix or vector of the model is loaded.
enum tandem_linear { TANDEM_QKV, TANDEM_O, TANDEM_GATE_UP, TANDEM_DOWN, TANDEM_HEAD };
enum tandem_vector { TANDEM_INPUT_NORM, TANDEM_POST_NORM, TANDEM_Q_NORM, TANDEM_K_NORM, TANDEM_FINAL_NORM };

// Where a step's time goes, on the calling thread.
enum tandem_phase {
  TANDEM_TIME_EMBED,
  TANDEM_TIME_NORM,
  TANDEM_TIME_QKV,
  TANDEM_TIME_ROTARY,
  TANDEM_TIME_ATTENTION,
  TANDEM_TIME_O,
  TANDEM_TIME_GATE_UP,
  TANDEM_TIME_DOWN,
  TANDEM_TIME_HEAD,
  TANDEM_TIME_COUNT
};

// Rows of a matrix, elements side by side.
struct tandem_rows {
  void* data;
  int64_t count;
  int64_t stride;  // in elements, as all strides
  int64_t width;
  int32_t dtype;
};

// [rows, heads, head_dim], the last side by side.
struct tandem_heads {
  const void* data;
  int64_t row_stride;
  int64_t head_stride;
  int32_t heads;
  int32_t dtype;
};

// Per row of the batch: cosines and sines of the first half of a head; rows of both lie `stride` apart.
struct tandem_rotary_rows {
  const void* cosines;
  const void* sines;
  int64_t stride;
  int32_t dtype;
};

// Layers that attend alike. The cache has room for `cache_heads` heads of this size per layer.
struct tandem_attention_kind {
  int32_t heads;
  int32_t kv_heads;
  int32_t cache_heads;
  int32_t head_dim;
  int32_t group;
  int32_t window;  // 0: unlimited
  float scale;
};

// What adapters add to some columns of a product: up · (down · x). Each row uses the matrices of its own slot. The matrices have the
// operations' dtype.
struct tandem_update {
  const void* down;  // [slots * rank, inputs]
  // [slots, vectors, rank, lanes], zero-padded: the columns in vectors of tandem_lanes(). In bfloat16 two rows of the rank lie side by
  // side, [slots, vectors, rank / 2, lanes, 2], and an odd rank is padded.
  const void* up;
  int32_t inputs;
  int32_t vectors;
  int32_t begin;  // of its columns those from here
  int32_t end;    // to here,
  int32_t first;  // which are added to the product's from this one on; its parts lie one below the other
};

struct tandem_updates {
  const tandem_update* updates;
  const int64_t* slots;  // of each row; below 0: it has none
  int32_t count;
  int32_t num_slots;
  int32_t rank;  // of a slot
};

enum tandem_activation { TANDEM_SILU, TANDEM_GELU_TANH };

TANDEM_API const char* tandem_error();

// The instruction set that a model of this dtype would run on; null when there is none. `limit` ("amx",
// "avx512bf16", "avx512", "avx2", "portable", or "") forbids everything above it.
TANDEM_API const char* tandem_instruction_set(int32_t dtype, const char* limit);

struct tandem_model;

// One thread per core number; a negative number leaves that thread free. Null on failure.
TANDEM_API tandem_model* tandem_create(const tandem_spec*, const int32_t* cores, int32_t threads, const char* limit);
TANDEM_API void tandem_destroy(tandem_model*);

// Copies the weights. The matrix is its parts one below the other; gate_up takes two parts, gate and up. Biases may be null. Blocks of one
// kind stay blocks; parts of several kinds are widened. A unit that multiplies bfloat16 computes with the blocks' weights rounded to it, any
// other with the weights as their format defines them.
TANDEM_API int tandem_load_linear(tandem_model*, int32_t which, int32_t layer, const tandem_part* weights,
                                  const tandem_part* biases, int32_t count);
TANDEM_API int tandem_load_vector(tandem_model*, int32_t which, int32_t layer, const tandem_part*);
// The memory that packed matrices take, in bytes.
TANDEM_API int64_t tandem_weight_bytes(const tandem_model*);
// The part's weights in float32, or rounded to bfloat16: [rows, inputs].
TANDEM_API int tandem_widen(const tandem_part*, int64_t inputs, int32_t dtype, void* out);
// Keeps the pointer to the embedding, [vocab, hidden], and does not copy it.
TANDEM_API int tandem_use_embedding(tandem_model*, const tandem_part*);
TANDEM_API int tandem_set_rotary(tandem_model*, const float* inverse_frequencies, int32_t count, float scaling);
// Writes all that was loaded to an empty file, for models with this specification on the same instruction set. Only the library that wrote
// a file may read it.
TANDEM_API int tandem_write_weights(tandem_model*, int32_t file);
// Maps such a file in place of loading, or in place of what was loaded, which is freed. The file may be closed afterwards.
TANDEM_API int tandem_use_weights(tandem_model*, int32_t file);
TANDEM_API int tandem_use_cache(tandem_model*, const tandem_cache*);

// One step: begin, then all layers in ascending ranges, then logits. The batch's arrays must stay valid until the last call.
TANDEM_API int tandem_begin(tandem_model*, const tandem_batch*);
TANDEM_API int tandem_run_layers(tandem_model*, int32_t first, int32_t last);
TANDEM_API int tandem_logits(tandem_model*, float* out, int64_t stride);
// For a step with many logit rows: the logits of some of them, and the hidden states that the head reads for some of them. `places` are
// indexes into the logit rows.
TANDEM_API int tandem_logits_of(tandem_model*, const int64_t* places, int32_t count, float* out, int64_t stride);
TANDEM_API int tandem_hidden_of(tandem_model*, const int64_t* places, int32_t count, float* out, int64_t stride);

// Begins (`on`) or ends the counting of nanoseconds per phase. `out` (TANDEM_TIME_COUNT numbers) gets the sums so far.
TANDEM_API int tandem_profile(tandem_model*, int32_t on, int64_t* out);

// The parts of a forward pass, one call each: see operations.h. A function that adds something returns its number.
struct tandem_operations;

TANDEM_API tandem_operations* tandem_operations_create(int32_t dtype, const int32_t* cores, int32_t threads,
                                                       const char* limit);
TANDEM_API void tandem_operations_destroy(tandem_operations*);
TANDEM_API int32_t tandem_lanes(const tandem_operations*);
// How often threads have met so far: at the beginning and the end of each call, and in between.
TANDEM_API int64_t tandem_meetings(const tandem_operations*);
TANDEM_API int tandem_add_linear(tandem_operations*, const tandem_part* weights, const tandem_part* biases,
                                 int32_t count, int32_t inputs, int32_t interleave);
TANDEM_API int tandem_add_norm(tandem_operations*, const tandem_part* weight, float offset, float eps);
TANDEM_API int tandem_add_attention(tandem_operations*, const tandem_attention_kind*);
TANDEM_API int tandem_operations_use_cache(tandem_operations*, const tandem_cache*);
// Updates may be null. A gated product has its own updates for gate_up and for down.
TANDEM_API int tandem_linear_rows(tandem_operations*, int32_t matrix, const tandem_rows* x, const tandem_rows* out,
                                  const tandem_updates*);
TANDEM_API int tandem_gated_rows(tandem_operations*, int32_t gate_up, int32_t down, int32_t activation,
                                 const tandem_rows* x, const tandem_rows* out, const tandem_updates* of_gate_up,
                                 const tandem_updates* of_down);
TANDEM_API int tandem_norm_rows(tandem_operations*, int32_t norm, const tandem_rows* x, const tandem_rows* out);
// Adds only what adapters add to a matrix's product: out += up · (down · x), by its one update.
TANDEM_API int tandem_update_rows(tandem_operations*, const tandem_updates*, const tandem_rows* x,
                                  const tandem_rows* out);
TANDEM_API int tandem_operations_begin(tandem_operations*, const tandem_batch*);
TANDEM_API int tandem_attend(tandem_operations*, int32_t kind, int32_t slot, const tandem_heads* q,
                             const tandem_heads* k, const tandem_heads* v, const tandem_rotary_rows* rotary,
                             const tandem_rows* out);
