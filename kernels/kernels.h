// What the instruction-set units and the rest of the library share: plain structs and one table of functions.
//
// Each unit (portable, avx2, avx512, avx512bf16, amx) is compiled with its own flags. So nothing here may generate code: an
// inline function compiled with AVX-512 flags could be the copy that the linker keeps for all callers.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace tandem {

enum class Dtype : int32_t {
  f32 = 0,
  bf16 = 1,
  f16 = 2,
  q4_0 = 3,  // from here on: blocks (elements.h), up to q6_k as GGUF files have them
  q4_1 = 4,
  q5_0 = 5,
  q5_1 = 6,
  q8_0 = 7,
  q4_k = 8,
  q5_k = 9,
  q6_k = 10,
  i4_32 = 11,  // integers of 4 or 8 bits, so many to a scale and a zero point
  i4_64 = 12,
  i4_128 = 13,
  i8_32 = 14,
  i8_64 = 15,
  i8_128 = 16,
};

// Softmax runs over blocks of this many keys, aligned to absolute positions, each with its own maximum; blocks
// are merged in order. A row's result therefore does not depend on the rows beside it, on how its prompt was
// cut into chunks, or on the number of threads.
constexpr int kKeyBlock = 256;
constexpr int kKeyBlockShift = 8;

// Query rows (token, head of the group) that attention takes at once.
constexpr int kLanes = 16;

// Tiles of so many rows that one task takes at most. They share the packing of K and V.
constexpr int kTaskTiles = 32;

// A linear layer, packed by the unit that runs it. Weights of K inputs are zero-padded to the unit's step.
struct Linear {
  const void* panels;
  int64_t panel_bytes;
  Dtype form;         // of the packed weights: the unit's own, or blocks
  int outliers;       // that each panel has room for, if its weights are compact; -1: they are not
  const float* bias;  // in the order of the packed columns, padded; null without bias
  int n;              // outputs
  int k;              // inputs
};

// Rows of a checkpoint's matrix, [rows, k] and contiguous. Several parts make one fused matrix. Rows of blocks have whole blocks.
struct WeightPart {
  const void* data;
  int64_t rows;
  Dtype dtype;
};

enum class GemmOut : int32_t {
  store,     // out = x w + bias
  add,       // out += x w + bias
  silu_mul,  // activation = silu(x gate) * (x up); gate and up columns alternate in the packed matrix
  gelu_mul,  // the same with GELU, by its approximation with tanh
};

// What adapters add to some columns of a product's rows: each row's `low` times the matrix of its slot.
struct Update {
  // [slots, vectors, rank, lanes], zero-padded: its columns in vectors of so many lanes. In bfloat16 two of a rank lie side by side:
  // [slots, vectors, rank / 2, lanes, 2].
  const void* up;
  Dtype dtype;          // of both
  int64_t slot_stride;  // in elements
  const void* low;       // [rows, rank]
  const int64_t* slots;  // of each row; below 0: it has none
  int rank;              // even in bfloat16
  int begin, end;  // which of its columns are added
  int first;       // the column of the product to which `begin` is added,
  int half;        // counted in this half of it where two alternate (silu_mul); otherwise -1
};

struct Gemm {
  const void* x;  // an activation: rows as this unit's gemm reads them
  int m;
  Linear w;
  GemmOut kind;
  float* out;
  int64_t out_stride;
  void* activation;  // of w.n / 2 columns, with silu_mul
  int threads;       // a hint for the size of tasks
  char* scratch;     // of the calling thread, gemm_scratch(w.k) bytes
  const Update* updates;  // added to each result before anything else is made of it
  int num_updates;
};

// RMSNorm of rows of x into an activation.
struct Norm {
  const float* x;
  int64_t stride;
  int n;
  const float* weight;
  float eps;
  void* activation;
};

// One layer of the paged cache. Strides are in elements.
struct Cache {
  void* base;  // of the layer's slot in block 0
  int64_t block_stride;
  int64_t kv_stride;    // from K to V
  int64_t head_stride;  // block_size * head_dim
  int block_shift;      // log2 of the block size
  int head_dim;
  Dtype dtype;
};

// Per-head norm and rotary embedding of Q and K, in place; K and V to the cache.
struct Rotary {
  float* qkv;
  int64_t stride;
  int heads;
  int kv_heads;
  int head_dim;
  const float* q_norm;  // null without
  const float* k_norm;
  float eps;
  const float* table;  // per position: head_dim / 2 cosines, then as many sines
  const int64_t* positions;
  const int64_t* slots;
  Cache cache;
};

struct Attention {
  const float* q;
  int64_t q_stride;
  Cache cache;
  int group;  // query heads per KV head
  float scale;
  int window;  // 0: unlimited
  const int32_t* table;
  int64_t table_stride;
  const int32_t* query_start;
  const int32_t* context_lens;
  void* activation;  // of `out_columns` columns
  int out_columns;
  float* partials;
  int32_t* pending;  // per (request, KV head) that is split: its blocks that are not finished
  char* scratch;     // of the calling thread
};

// Either whole query tiles over all their keys, or (`blocks` > 0) the request's only tile over one key block.
struct AttentionTask {
  int32_t request;
  int32_t kv_head;
  int32_t tile_begin;
  int32_t tile_end;
  int32_t block;        // with blocks > 0: which key block
  int32_t first_block;  // with blocks > 0: where the request's keys begin
  int32_t blocks;       // 0: not split
  int32_t pending;      // with blocks > 0: index into Attention::pending
  int64_t partial;      // with blocks > 0: offset into Attention::partials, of first_block's partial
};

// All sizes in bytes unless they say otherwise.
struct Kernels {
  const char* name;
  Dtype dtype;  // of weights, and of the cache
  int (*padded_columns)(int n);
  int (*panels)(int n);
  // The size of a panel by the matrix' inputs, form and outliers.
  int64_t (*panel_bytes)(const Linear&);
  // How many outliers a compact panel would have. Null in a unit that has none. With `interleave` the columns of
  // two parts of equal size alternate in steps of this unit (silu_mul); otherwise the parts lie one below the other.
  int (*outliers)(const WeightPart* parts, int count, bool interleave, int k, int panel);
  // Writes one panel of `w` from the matrix that the parts make.
  void (*pack)(const Linear& w, const WeightPart* parts, int count, bool interleave, int panel, char* scratch);
  void (*pack_bias)(float* bias, const WeightPart* parts, int count, bool interleave);
  size_t (*activation_bytes)(int rows, int k);
  void (*read_activation)(const void* activation, int k, int row, float* out);
  void (*write_activation)(void* activation, int k, int row, const float* x);
  // Row i of `to`, for i in [begin, end), becomes row rows[i] of `from`.
  void (*gather)(const void* from, void* to, int k, const int64_t* rows, int begin, int end);
  size_t (*gemm_scratch)(int k);
  int (*gemm_tasks)(const Gemm&);
  void (*gemm)(const Gemm&, int task);
  void (*norm)(const Norm&, int begin, int end);
  void (*norm_row)(float* x, const float* weight, int n, float eps);  // in place
  void (*rotary)(const Rotary&, int begin, int end);
  int lanes;  // of a vector
  // out[j] = x · row j, for `n` rows of k elements that lie `stride` elements apart; all of this dtype. Also fetches the `n` rows that
  // begin at `next`, unless it is null.
  void (*dot_rows)(const void* x, const void* rows, const void* next, int64_t stride, int n, int k, void* out);
  // Adds the columns [begin, end) of what an update adds to a row; `begin` is a multiple of `lanes`.
  void (*add_update)(const Update&, int row, int begin, int end, float* out);
  size_t (*attention_scratch)(int head_dim);
  int64_t (*partial_floats)(int head_dim, int lanes);
  // `next` is a split task that will soon run, or null. The kernel fetches its K meanwhile.
  void (*attention)(const Attention&, const AttentionTask&, const AttentionTask* next);
  void (*enter)();  // a thread begins to run kernels; leave() when it has finished
  void (*leave)();
};

// Null where the processor lacks the unit or the unit the dtype.
const Kernels* portable_kernels(Dtype);
const Kernels* avx2_kernels(Dtype);
const Kernels* avx512_kernels(Dtype);
const Kernels* avx512bf16_kernels(Dtype);
const Kernels* amx_kernels(Dtype);

}  // namespace tandem
