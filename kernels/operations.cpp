#include "operations.h"

#include <string.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "elements.h"
#include "model.h"
#include "packed.h"

namespace tandem {
namespace {

constexpr int kRowsPerTask = 8;

int tasks_of(int64_t rows) { return static_cast<int>((rows + kRowsPerTask - 1) / kRowsPerTask); }

// Elements [0, n) of a row, in float32.
void widen(const void* from, int64_t at, Dtype dtype, int n, float* out) {
  if (dtype == Dtype::f32) {
    memcpy(out, static_cast<const float*>(from) + at, static_cast<size_t>(n) * 4);
    return;
  }
  const uint16_t* p = static_cast<const uint16_t*>(from) + at;
  for (int i = 0; i < n; i++) out[i] = bf16_to_float(p[i]);
}

// To the nearest, ties to even, as torch rounds.
void narrow(const float* from, int n, Dtype dtype, void* to, int64_t at) {
  if (dtype == Dtype::f32) {
    memcpy(static_cast<float*>(to) + at, from, static_cast<size_t>(n) * 4);
    return;
  }
  uint16_t* p = static_cast<uint16_t*>(to) + at;
  for (int i = 0; i < n; i++) {
    uint32_t bits;
    memcpy(&bits, from + i, 4);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
    p[i] = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
  }
}

Dtype dtype_of(int32_t code) { return static_cast<Dtype>(code); }

void require_rows(const tandem_rows& r, int width, const char* what) {
  require(r.width == width, std::string(what) + " has rows of " + std::to_string(r.width) + " elements where " +
                                std::to_string(width) + " belong");
  require(r.dtype == 0 || r.dtype == 1, "rows are float32 or bfloat16");
}

}  // namespace

Operations::Operations(const Kernels* kernels, std::vector<int> cores) : kernels_(kernels), team_(std::move(cores)) {}

void Operations::grow_scratch(size_t bytes) {
  const int64_t stride = static_cast<int64_t>((bytes + 4095) / 4096 * 4096);
  if (stride <= scratch_stride_) return;
  scratch_stride_ = stride;
  scratch_ = Region(static_cast<size_t>(stride * team_.size()));
}

int Operations::add_linear(const tandem_part* weights, const tandem_part* biases, int count, int inputs,
                           bool interleave) {
  const std::vector<WeightPart> parts = parts_of(weights, count);
  int64_t rows = 0;
  for (const WeightPart& part : parts) rows += part.rows;
  require(!interleave || (count == 2 && parts[0].rows == parts[1].rows), "gate and up must be alike");
  auto packed = std::make_unique<Packed>();
  Linear& w = packed->w;
  w.n = static_cast<int>(rows);
  w.k = inputs;
  grow_scratch(kernels_->gemm_scratch(inputs));
  choose_form(w, *kernels_, team_, parts, interleave);
  packed->panels = Region(static_cast<size_t>(kernels_->panels(w.n) * w.panel_bytes));
  w.panels = packed->panels.data();
  pack_panels(w, *kernels_, team_, parts, interleave, [this](int thread) { return scratch_of(thread); });
  if (biases) {
    packed->bias.resize(static_cast<size_t>(kernels_->padded_columns(w.n)));
    kernels_->pack_bias(packed->bias.data(), parts_of(biases, count).data(), count, interleave);
    w.bias = packed->bias.data();
  }
  matrices_.push_back(std::move(packed));
  return static_cast<int>(matrices_.size()) - 1;
}

int Operations::add_norm(const tandem_part& weight, float offset, float eps) {
  NormWeight norm{std::vector<float>(static_cast<size_t>(weight.rows)), eps};
  for (int64_t i = 0; i < weight.rows; i++)
    norm.weight[static_cast<size_t>(i)] = element(weight.data, i, dtype_of(weight.dtype)) + offset;
  norms_.push_back(std::move(norm));
  return static_cast<int>(norms_.size()) - 1;
}

int Operations::add_attention(const tandem_attention_kind& kind) {
  require(kind.kv_heads > 0 && kind.heads % kind.kv_heads == 0, "the heads cannot be divided among the KV heads");
  require(kind.head_dim > 0 && kind.head_dim <= 256 && kind.head_dim % 2 == 0, "no such head size");
  grow_scratch(kernels_->attention_scratch(kind.head_dim));
  kinds_.push_back({kind, {kind.group, kind.window, false, {}, {}, 0}});
  return static_cast<int>(kinds_.size()) - 1;
}

void Operations::use_cache(const tandem_cache& cache) {
  require(cache.block_size > 0 && (cache.block_size & (cache.block_size - 1)) == 0,
          "the block size must be a power of two");
  cache_ = cache;
  block_shift_ = 0;
  while (1 << block_shift_ < cache.block_size) block_shift_++;
}

const Linear& Operations::matrix(int index) const {
  require(index >= 0 && index < static_cast<int>(matrices_.size()), "no such matrix");
  return matrices_[static_cast<size_t>(index)]->w;
}

template <typename Work, typename Read>
void Operations::divide_with(int thread, int count, Updates& updates, Work&& work, Read&& read) {
  int64_t last = -1;
  const void* row_of = nullptr;
  team_.divide(thread, count + updates.tasks(), [&](int task) {
    if (task < count) {
      last = -1;  // it uses the same scratch
      return work(task);
    }
    task -= count;
    if (updates.is_void(task)) return;
    const int64_t row = updates.row_of(task);
    if (last != row) row_of = read(row);
    last = row;
    updates.shrink(task, row_of);
  });
  team_.barrier();
}

const void* Operations::in_own_dtype(int thread, const tandem_rows& x, int64_t row) const {
  const char* const at = static_cast<const char*>(x.data) + row * x.stride * (dtype_of(x.dtype) == Dtype::f32 ? 4 : 2);
  if (dtype_of(x.dtype) == kernels_->dtype) return at;
  char* const space = scratch_of(thread);
  if (kernels_->dtype == Dtype::f32)
    widen(x.data, row * x.stride, Dtype::bf16, static_cast<int>(x.width), reinterpret_cast<float*>(space));
  else
    narrow(reinterpret_cast<const float*>(at), static_cast<int>(x.width), Dtype::bf16, space, 0);
  return space;
}

// Rows as this unit's products read them, and the first halves of what is added to these. Ends at a barrier.
void Operations::take(int thread, const tandem_rows& x, int k, void* activation, Updates& updates) {
  float* const space = reinterpret_cast<float*>(scratch_of(thread));
  const auto write = [&](int task) {
    const int64_t end = std::min<int64_t>(x.count, static_cast<int64_t>(task + 1) * kRowsPerTask);
    for (int64_t row = static_cast<int64_t>(task) * kRowsPerTask; row < end; row++) {
      widen(x.data, row * x.stride, dtype_of(x.dtype), k, space);
      kernels_->write_activation(activation, k, static_cast<int>(row), space);
    }
  };
  divide_with(thread, tasks_of(x.count), updates, write, [&](int64_t row) { return in_own_dtype(thread, x, row); });
}

void Operations::give(int thread, const float* from, int64_t stride, const tandem_rows& out) {
  team_.divide(thread, tasks_of(out.count), [&](int task) {
    const int64_t end = std::min<int64_t>(out.count, static_cast<int64_t>(task + 1) * kRowsPerTask);
    for (int64_t row = static_cast<int64_t>(task) * kRowsPerTask; row < end; row++)
      narrow(from + row * stride, static_cast<int>(out.width), dtype_of(out.dtype), out.data, row * out.stride);
  });
}

void Operations::multiply(int thread, Gemm gemm) {
  gemm.scratch = scratch_of(thread);
  team_.divide(thread, kernels_->gemm_tasks(gemm), [&](int task) { kernels_->gemm(gemm, task); });
  team_.barrier();
}

void Operations::linear(int index, const tandem_rows& x, const tandem_rows& out, const tandem_updates* updates) {
  const Linear& w = matrix(index);
  require_rows(x, w.k, "the input of a product");
  require_rows(out, w.n, "the result of a product");
  require(x.count == out.count, "as many rows go out as come in");
  if (x.count == 0) return;
  updates_.prepare(updates, *kernels_, w.k, w.n, false, x.count);
  grow_scratch(static_cast<size_t>(w.k) * 4);
  in_.reserve(kernels_->activation_bytes(static_cast<int>(x.count), w.k));
  const bool direct = dtype_of(out.dtype) == Dtype::f32;
  if (!direct) out_.reserve(static_cast<size_t>(x.count) * static_cast<size_t>(w.n) * 4);
  Gemm g{};
  g.x = in_.data();
  g.m = static_cast<int>(x.count);
  g.w = w;
  g.kind = GemmOut::store;
  g.threads = team_.size();
  g.out = direct ? static_cast<float*>(out.data) : reinterpret_cast<float*>(out_.data());
  g.out_stride = direct ? out.stride : w.n;
  updates_.give(g);
  team_.run([&](int thread) {
    kernels_->enter();
    take(thread, x, w.k, in_.data(), updates_);
    multiply(thread, g);
    if (!direct) give(thread, g.out, w.n, out);
    kernels_->leave();
  });
}

void Operations::update(const tandem_updates& updates, const tandem_rows& x, const tandem_rows& out) {
  require(updates.count == 1, "rows that are there already get one update");
  require_rows(x, updates.updates->inputs, "what an update reads");
  require_rows(out, updates.updates->end - updates.updates->begin, "what an update is added to");
  require(x.count == out.count, "as many rows go out as come in");
  const int inputs = static_cast<int>(x.width), outputs = static_cast<int>(out.width), lanes = kernels_->lanes;
  updates_.prepare(&updates, *kernels_, inputs, outputs, false, x.count);
  grow_scratch(static_cast<size_t>(std::max(inputs, outputs)) * 4);
  // Parts of a row, so that one alone keeps several threads busy.
  constexpr int kParts = 4;
  const int vectors = (outputs + lanes - 1) / lanes;
  const auto part = [&](int index) { return std::min(outputs, vectors * index / kParts * lanes); };
  const Update& added = updates_.all().front();
  const Dtype dtype = dtype_of(out.dtype);
  team_.run([&](int thread) {
    divide_with(thread, 0, updates_, [](int) {}, [&](int64_t row) { return in_own_dtype(thread, x, row); });
    float* const row_of = reinterpret_cast<float*>(scratch_of(thread));
    team_.divide(thread, static_cast<int>(x.count) * kParts, [&](int task) {
      const int64_t row = task / kParts;
      const int begin = part(task % kParts), end = part(task % kParts + 1);
      if (updates.slots[row] < 0 || begin == end) return;
      widen(out.data, row * out.stride + begin, dtype, end - begin, row_of);
      kernels_->add_update(added, static_cast<int>(row), added.begin + begin, added.begin + end, row_of);
      narrow(row_of, end - begin, dtype, out.data, row * out.stride + begin);
    });
  });
}

void Operations::gated(int gate_up, int down, int activation, const tandem_rows& x, const tandem_rows& out,
                       const tandem_updates* of_gate_up, const tandem_updates* of_down) {
  const Linear &first = matrix(gate_up), &second = matrix(down);
  require_rows(x, first.k, "the input of a gated product");
  require_rows(out, second.n, "the result of a gated product");
  require(first.n == 2 * second.k, "the gate does not fit what follows it");
  require(activation == TANDEM_SILU || activation == TANDEM_GELU_TANH, "no such activation");
  require(x.count == out.count, "as many rows go out as come in");
  if (x.count == 0) return;
  const int rows = static_cast<int>(x.count);
  updates_.prepare(of_gate_up, *kernels_, first.k, first.n, true, x.count);
  second_updates_.prepare(of_down, *kernels_, second.k, second.n, false, x.count);
  grow_scratch(static_cast<size_t>(std::max(first.k, second.k)) * 8);
  in_.reserve(kernels_->activation_bytes(rows, first.k));
  middle_.reserve(kernels_->activation_bytes(rows, second.k));
  const bool direct = dtype_of(out.dtype) == Dtype::f32;
  if (!direct) out_.reserve(static_cast<size_t>(rows) * static_cast<size_t>(second.n) * 4);
  Gemm a{}, b{};
  a.x = in_.data();
  a.m = b.m = rows;
  a.w = first;
  a.kind = activation == TANDEM_SILU ? GemmOut::silu_mul : GemmOut::gelu_mul;
  a.threads = b.threads = team_.size();
  a.activation = middle_.data();
  b.x = middle_.data();
  b.w = second;
  b.kind = GemmOut::store;
  b.out = direct ? static_cast<float*>(out.data) : reinterpret_cast<float*>(out_.data());
  b.out_stride = direct ? out.stride : second.n;
  updates_.give(a);
  second_updates_.give(b);
  team_.run([&](int thread) {
    kernels_->enter();
    take(thread, x, first.k, in_.data(), updates_);
    multiply(thread, a);
    if (b.num_updates > 0) {
      float* const wide = reinterpret_cast<float*>(scratch_of(thread));
      const auto read = [&](int64_t row) {
        kernels_->read_activation(middle_.data(), second.k, static_cast<int>(row), wide);
        if (kernels_->dtype == Dtype::f32) return static_cast<const void*>(wide);
        narrow(wide, second.k, Dtype::bf16, wide + second.k, 0);
        return static_cast<const void*>(wide + second.k);
      };
      divide_with(thread, 0, second_updates_, [](int) {}, read);
    }
    multiply(thread, b);
    if (!direct) give(thread, b.out, second.n, out);
    kernels_->leave();
  });
}

void Operations::norm(int index, const tandem_rows& x, const tandem_rows& out) {
  require(index >= 0 && index < static_cast<int>(norms_.size()), "no such norm");
  const NormWeight& norm = norms_[static_cast<size_t>(index)];
  const int n = static_cast<int>(norm.weight.size());
  require_rows(x, n, "the input of a norm");
  require_rows(out, n, "the result of a norm");
  require(x.count == out.count, "as many rows go out as come in");
  grow_scratch(static_cast<size_t>(n) * 4);
  const auto run = [&](int thread, int64_t begin, int64_t end) {
    float* row_of = reinterpret_cast<float*>(scratch_of(thread));
    for (int64_t row = begin; row < end; row++) {
      widen(x.data, row * x.stride, dtype_of(x.dtype), n, row_of);
      kernels_->norm_row(row_of, norm.weight.data(), n, norm.eps);
      narrow(row_of, n, dtype_of(out.dtype), out.data, row * out.stride);
    }
  };
  // Waking others takes longer than a few rows do.
  if (x.count <= 2 * kRowsPerTask) return run(0, 0, x.count);
  team_.run([&](int thread) {
    team_.divide(thread, tasks_of(x.count), [&](int task) {
      run(thread, static_cast<int64_t>(task) * kRowsPerTask,
          std::min<int64_t>(x.count, static_cast<int64_t>(task + 1) * kRowsPerTask));
    });
  });
}

Cache Operations::layer_cache(const Kind& kind, int slot) const {
  const int64_t head = static_cast<int64_t>(cache_.block_size) * kind.asked.head_dim;
  const int64_t kv = head * kind.asked.cache_heads;
  const int element = kernels_->dtype == Dtype::f32 ? 4 : 2;
  Cache c;
  c.base = static_cast<char*>(cache_.data) + slot * 2 * kv * element;
  c.block_stride = cache_.slots * 2 * kv;
  c.kv_stride = kv;
  c.head_stride = head;
  c.block_shift = block_shift_;
  c.head_dim = kind.asked.head_dim;
  c.dtype = kernels_->dtype;
  return c;
}

void Operations::begin(const tandem_batch& batch) {
  require(cache_.data != nullptr, "there is no cache yet");
  begun_ = false;
  check_batch(batch, cache_, block_shift_);
  size_t partials = 0;
  for (Kind& kind : kinds_) {
    tandem_spec spec{};
    spec.heads = kind.asked.heads;
    spec.kv_heads = kind.asked.kv_heads;
    spec.head_dim = kind.asked.head_dim;
    kind.plan.make(batch, spec, *kernels_, team_.size());
    partials = std::max(partials, static_cast<size_t>(kind.plan.partial_floats));
  }
  partials_.reserve(partials * sizeof(float));
  while (static_cast<int>(numbers_.size()) < batch.tokens) numbers_.push_back(static_cast<int64_t>(numbers_.size()));
  batch_ = batch;
  begun_ = true;
}

// Rotates Q and K, and writes K and V to the cache. Ends at a barrier.
void Operations::write_kv(int thread, const Kind& kind, const Cache& cache, const tandem_heads& q,
                          const tandem_heads& k, const tandem_heads& v, const tandem_rotary_rows* rotary) {
  const int d = kind.asked.head_dim, half = d / 2;
  const int width = (kind.asked.heads + 2 * kind.asked.kv_heads) * d;
  float *qkv = reinterpret_cast<float*>(qkv_.data()), *table = reinterpret_cast<float*>(table_.data());
  Rotary r{};
  r.qkv = qkv;
  r.stride = width;
  r.heads = kind.asked.heads;
  r.kv_heads = kind.asked.kv_heads;
  r.head_dim = d;
  r.table = table;
  r.positions = numbers_.data();
  r.slots = batch_.slot_mapping[kind.asked.group];
  r.cache = cache;
  float row_of[256];
  team_.divide(thread, tasks_of(batch_.tokens), [&](int task) {
    const int begin = task * kRowsPerTask, end = std::min(batch_.tokens, begin + kRowsPerTask);
    for (int row = begin; row < end; row++) {
      float* to = qkv + static_cast<int64_t>(row) * width;
      const tandem_heads* const parts[] = {&q, &k, &v};
      for (const tandem_heads* part : parts)
        for (int h = 0; h < part->heads; h++, to += d)
          widen(part->data, row * part->row_stride + h * part->head_stride, dtype_of(part->dtype), d, to);
      float* angles = table + static_cast<int64_t>(row) * d;
      if (rotary) {
        const Dtype dtype = dtype_of(rotary->dtype);
        widen(rotary->cosines, row * rotary->stride, dtype, half, angles);
        widen(rotary->sines, row * rotary->stride, dtype, half, row_of);
        memcpy(angles + half, row_of, static_cast<size_t>(half) * 4);
      } else {
        for (int i = 0; i < half; i++) angles[i] = 1, angles[half + i] = 0;
      }
    }
    kernels_->rotary(r, begin, end);
  });
  team_.barrier();
}

void Operations::attend(int index, int slot, const tandem_heads& q, const tandem_heads& k, const tandem_heads& v,
                        const tandem_rotary_rows* rotary, const tandem_rows& out) {
  require(begun_, "attention comes after a step has begun");
  require(index >= 0 && index < static_cast<int>(kinds_.size()), "no such attention");
  Kind& kind = kinds_[static_cast<size_t>(index)];
  const int d = kind.asked.head_dim, width = (kind.asked.heads + 2 * kind.asked.kv_heads) * d;
  const int q_size = kind.asked.heads * d, tokens = batch_.tokens;
  require(slot >= 0 && slot < cache_.slots, "no such slot in the cache");
  require(q.heads == kind.asked.heads && k.heads == kind.asked.kv_heads && v.heads == kind.asked.kv_heads,
          "another number of heads");
  require_rows(out, q_size, "what attention found");
  require(out.count == tokens, "as many rows go out as come in");
  qkv_.reserve(static_cast<size_t>(tokens) * static_cast<size_t>(width) * 4);
  table_.reserve(static_cast<size_t>(tokens) * static_cast<size_t>(d) * 4);
  in_.reserve(kernels_->activation_bytes(tokens, q_size));
  grow_scratch(static_cast<size_t>(q_size) * 4);
  const Cache cache = layer_cache(kind, slot);
  Attention a{};
  a.q = reinterpret_cast<const float*>(qkv_.data());
  a.q_stride = width;
  a.cache = cache;
  a.group = kind.asked.heads / kind.asked.kv_heads;
  a.scale = kind.asked.scale;
  a.window = kind.asked.window;
  a.table = batch_.block_tables[kind.asked.group];
  a.table_stride = batch_.block_table_strides[kind.asked.group];
  a.query_start = batch_.query_start;
  a.context_lens = batch_.context_lens;
  a.activation = in_.data();
  a.out_columns = q_size;
  a.partials = reinterpret_cast<float*>(partials_.data());
  a.pending = kind.plan.pending.data();
  const int count = static_cast<int>(kind.plan.tasks.size());
  team_.run([&](int thread) {
    kernels_->enter();
    write_kv(thread, kind, cache, q, k, v, rotary);
    Attention mine = a;
    mine.scratch = scratch_of(thread);
    team_.share(count, [&](int task_index) {
      const AttentionTask* task = &kind.plan.tasks[static_cast<size_t>(task_index)];
      const AttentionTask* next = task_index + team_.size() < count ? task + team_.size() : nullptr;
      kernels_->attention(mine, *task, next && next->blocks > 0 ? next : nullptr);
    });
    team_.barrier();
    float* row_of = reinterpret_cast<float*>(scratch_of(thread));
    team_.divide(thread, tasks_of(tokens), [&](int task) {
      const int end = std::min(tokens, (task + 1) * kRowsPerTask);
      for (int row = task * kRowsPerTask; row < end; row++) {
        kernels_->read_activation(in_.data(), q_size, row, row_of);
        narrow(row_of, q_size, dtype_of(out.dtype), out.data, row * out.stride);
      }
    });
    kernels_->leave();
  });
}

}  // namespace tandem
