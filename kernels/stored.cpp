// A loaded model in a file, which all processes of a machine map: packed matrices and embedding as they lie in memory, then the record, which
// is everything else, then the record's place.
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include <stdexcept>
#include <system_error>

#include "elements.h"
#include "model.h"

namespace tandem {
namespace {

struct Place {
  char magic[8];
  int64_t record;
};

constexpr char kMagic[8] = {'t', 'a', 'n', 'd', 'e', 'm', 'w', '1'};
constexpr int64_t kLine = 64;

int64_t rounded(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

void write_all(int file, const void* data, int64_t bytes) {
  for (const char* at = static_cast<const char*>(data); bytes > 0;) {
    const ssize_t written = write(file, at, static_cast<size_t>(bytes < (1 << 26) ? bytes : 1 << 26));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) throw std::system_error(written < 0 ? errno : EIO, std::generic_category(), "the file cannot be written");
    at += written;
    bytes -= written;
  }
}

// Makes the record of what it is shown. A matrix is named by its place among the packed ones.
class Writer {
 public:
  explicit Writer(const char* panels) : panels_(panels) {}

  template <typename T>
  void value(const T& v) {
    const char* bytes = reinterpret_cast<const char*>(&v);
    record.insert(record.end(), bytes, bytes + sizeof v);
  }

  void floats(const std::vector<float>& v) { floats(v.data(), v.size()); }

  void linear(const Linear& w, int padded_columns) {
    value(w);
    value(static_cast<const char*>(w.panels) - panels_);
    if (w.bias) floats(w.bias, static_cast<size_t>(padded_columns));
  }

  template <typename T>
  size_t size_of(const std::vector<T>& v) {
    value(v.size());
    return v.size();
  }

  std::vector<char> record;

 private:
  void floats(const float* v, size_t count) {
    value(count);
    for (size_t i = 0; i < count; i++) value(v[i]);
  }

  const char* const panels_;
};

// Puts back what a Writer was shown, in the same order.
class Reader {
 public:
  Reader(const char* panels, const char* record, const char* end, std::vector<std::vector<float>>* biases)
      : panels_(panels), at_(record), end_(end), biases_(biases) {}

  template <typename T>
  void value(T& v) {
    require(end_ - at_ >= static_cast<int64_t>(sizeof v), "the file of weights ends too early");
    memcpy(&v, at_, sizeof v);
    at_ += sizeof v;
  }

  void floats(std::vector<float>& v) {
    v.resize(size());
    for (float& f : v) value(f);
  }

  void linear(Linear& w, int padded_columns) {
    value(w);
    int64_t place;
    value(place);
    if (w.panels) w.panels = panels_ + place;
    if (!w.bias) return;
    biases_->emplace_back();
    floats(biases_->back());
    require(static_cast<int>(biases_->back().size()) == padded_columns, "a bias has another size");
    w.bias = biases_->back().data();
  }

  template <typename T>
  size_t size_of(std::vector<T>& v) {
    v.resize(size());
    return v.size();
  }

 private:
  size_t size() {
    size_t n;
    value(n);
    require(n <= static_cast<size_t>(end_ - at_), "the file of weights ends too early");
    return n;
  }

  const char* const panels_;
  const char* at_;
  const char* const end_;
  std::vector<std::vector<float>>* const biases_;
};

}  // namespace

template <typename Walk>
void Model::each_loaded(Walk& walk) {
  const auto linear = [&](Linear& w) { walk.linear(w, kernels_->padded_columns(w.n)); };
  walk.value(weights_used_);
  for (Layer& layer : layers_) {
    for (Linear* w : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) linear(*w);
    for (size_t i = 0, count = walk.size_of(layer.apart); i < count; i++) linear(layer.apart[i]);
    for (std::vector<float>* v : {&layer.input_norm, &layer.post_norm, &layer.q_norm, &layer.k_norm}) walk.floats(*v);
  }
  linear(head_);
  walk.floats(final_norm_);
  walk.floats(inverse_frequencies_);
  walk.value(rotary_scaling_);
  walk.value(embedding_.rows);
  walk.value(embedding_.dtype);
}

void Model::write_weights(int file) {
  require(missing_.empty() && embedding_.data, "the model is not loaded");
  const int64_t embedding_bytes = bytes_of(embedding_.rows * spec_.hidden, static_cast<Dtype>(embedding_.dtype));
  Writer writer(weights_.data());
  each_loaded(writer);
  const char nothing[kLine] = {};
  const auto padded = [&](const void* data, int64_t bytes) {
    write_all(file, data, bytes);
    write_all(file, nothing, rounded(bytes) - bytes);
  };
  padded(weights_.data(), weights_used_);
  padded(embedding_.data, embedding_bytes);
  write_all(file, writer.record.data(), static_cast<int64_t>(writer.record.size()));
  Place place = {};
  memcpy(place.magic, kMagic, sizeof kMagic);
  place.record = rounded(weights_used_) + rounded(embedding_bytes);
  write_all(file, &place, sizeof place);
}

void Model::use_weights(int file) {
  const int64_t size = lseek(file, 0, SEEK_END);
  if (size < 0) throw std::system_error(errno, std::generic_category(), "lseek");
  Place place;
  require(size > static_cast<int64_t>(sizeof place), "the file of weights is empty");
  Region mapped(file, static_cast<size_t>(size));
  const char* end = mapped.data() + size - sizeof place;
  memcpy(&place, end, sizeof place);
  require(memcmp(place.magic, kMagic, sizeof kMagic) == 0 && place.record >= 0 && place.record < size - static_cast<int64_t>(sizeof place),
          "this is no file of weights");
  biases_.clear();
  Reader reader(mapped.data(), mapped.data() + place.record, end, &biases_);
  each_loaded(reader);
  const int64_t embedding_bytes = bytes_of(embedding_.rows * spec_.hidden, static_cast<Dtype>(embedding_.dtype));
  require(rounded(weights_used_) + rounded(embedding_bytes) == place.record, "the file of weights has another size");
  embedding_.data = mapped.data() + rounded(weights_used_);
  missing_.clear();
  rotary_.clear();
  weights_ = std::move(mapped);
}

}  // namespace tandem
