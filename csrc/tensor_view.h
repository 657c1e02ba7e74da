// A checked view of a DLPack capsule. The capsule is borrowed: it is neither renamed nor deleted, and the Python
// caller holds the tensor for the duration of the call. The only file that knows DLPack.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels.h"

namespace pydflash {

// The ABI of DLPack 0.8 and 1.x, as far as it is read here.
namespace dlpack {
struct Device {
  int32_t type, id;
};
struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};
struct Managed {
  Tensor tensor;
};
struct ManagedVersioned {
  uint32_t major, minor;
  void *context, *deleter;
  uint64_t flags;
  Tensor tensor;
};
}  // namespace dlpack

// Without streams: their locales clash where a module and its host bring a C++ library each.
inline void append_part(std::string& out, const std::string& part) { out += part; }
inline void append_part(std::string& out, const char* part) { out += part; }
template <class Number, class = std::enable_if_t<std::is_arithmetic_v<Number>>>
void append_part(std::string& out, Number part) {
  out += std::to_string(part);
}

template <class... Parts>
std::string text(const Parts&... parts) {
  std::string out;
  (append_part(out, parts), ...);
  return out;
}

inline std::string shape_text(const std::vector<int64_t>& shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

// One argument of an op. Every check names the op and the argument, says what was expected and what came.
class TensorView {
 public:
  TensorView(const char* op, const char* name, pybind11::capsule capsule) : op_(op), name_(name) {
    const char* kind = capsule.name();
    const dlpack::Tensor* t = nullptr;
    if (kind != nullptr && std::string(kind) == "dltensor") {
      t = &static_cast<dlpack::Managed*>(capsule.get_pointer())->tensor;
    } else if (kind != nullptr && std::string(kind) == "dltensor_versioned") {
      t = &static_cast<dlpack::ManagedVersioned*>(capsule.get_pointer())->tensor;
    } else {
      fail("a live DLPack capsule", kind == nullptr ? "an unnamed one" : kind);
    }
    data_ = static_cast<char*>(t->data) + t->byte_offset;
    code_ = t->dtype.code;
    bits_ = t->dtype.bits;
    shape_.assign(t->shape, t->shape + t->ndim);
    strides_.resize(shape_.size());
    int64_t dense = 1;
    for (int i = t->ndim - 1; i >= 0; --i) {
      strides_[i] = t->strides != nullptr ? t->strides[i] : dense;
      if (shape_[i] > INT32_MAX)  // params hold sizes as int
        fail("of less than 2^31 in each dimension", shape_text(shape_));
      dense *= shape_[i] > 0 ? shape_[i] : 1;
    }
  }

  void* data() const { return data_; }
  int rank() const { return int(shape_.size()); }
  int64_t dim(int i) const {
    needs(i + 1);
    return shape_[size_t(i)];
  }
  int64_t stride(int i) const {
    needs(i + 1);
    return strides_[size_t(i)];
  }
  int element_size() const { return bits_ / 8; }
  bool empty() const {
    for (int64_t n : shape_)
      if (n == 0) return true;
    return false;
  }

  DType dtype() const {
    if (code_ == 2 && bits_ == 32) return DType::f32;
    if (code_ == 4 && bits_ == 16) return DType::bf16;
    if (code_ == 2 && bits_ == 16) return DType::f16;
    fail("float32, bfloat16 or float16", dtype_text());
  }

  const TensorView& floating() const {
    dtype();
    return *this;
  }
  const TensorView& is(const char* expected, uint8_t code, uint8_t bits) const {
    if (code_ != code || bits_ != bits) fail(expected, dtype_text());
    return *this;
  }
  const TensorView& int64() const { return is("int64", 0, 64); }
  const TensorView& int32() const { return is("int32", 0, 32); }
  const TensorView& float32() const { return is("float32", 2, 32); }
  const TensorView& like(const TensorView& other) const {
    if (code_ != other.code_ || bits_ != other.bits_)
      fail(text(other.dtype_text(), ", as ", other.name_), dtype_text());
    return *this;
  }

  // -1 leaves a dimension free.
  const TensorView& shape(std::initializer_list<int64_t> expected, const char* letters) const {
    bool same = expected.size() == shape_.size();
    size_t i = 0;
    for (int64_t n : expected) {
      same = same && (n < 0 || n == shape_[i]);
      ++i;
    }
    if (!same) {
      std::vector<int64_t> wanted(expected);
      std::string sizes = shape_text(wanted);
      for (size_t at; (at = sizes.find("-1")) != std::string::npos;) sizes.replace(at, 2, "?");
      fail(text("of shape ", letters, " = ", sizes), shape_text(shape_));
    }
    return *this;
  }
  const TensorView& row_contiguous() const {
    if (!shape_.empty() && shape_.back() > 1 && strides_.back() != 1)
      fail("contiguous in its last dimension", text("stride ", strides_.back()));
    return *this;
  }
  const TensorView& contiguous() const {
    if (empty()) return *this;  // strides of nothing mean nothing
    int64_t dense = 1;
    for (int i = int(shape_.size()) - 1; i >= 0; --i) {
      if (shape_[i] > 1 && strides_[i] != dense) fail("contiguous", text("stride ", strides_[i], " in dim ", i));
      dense *= shape_[i];
    }
    return *this;
  }

  // Dimensions from `first` on lie as in a contiguous tensor; those before may have any strides.
  const TensorView& dense_behind(int first) const {
    if (empty()) return *this;
    int64_t dense = 1;
    for (int i = int(shape_.size()) - 1; i >= first; --i) {
      if (shape_[size_t(i)] > 1 && strides_[size_t(i)] != dense)
        fail(text("contiguous from dim ", first, " on"), text("stride ", strides_[size_t(i)], " in dim ", i));
      dense *= shape_[size_t(i)];
    }
    return *this;
  }

  void strides_to(int64_t* out, int count) const {
    needs(count);
    for (int i = 0; i < count; ++i) out[i] = strides_[size_t(i)];
  }

  [[noreturn]] void fail(const std::string& expected, const std::string& got) const {
    throw std::invalid_argument(text(op_, ": ", name_, " must be ", expected, ", got ", got));
  }

 private:
  void needs(int rank) const {
    if (int(shape_.size()) < rank) fail(text("of at least ", rank, " dimensions"), shape_text(shape_));
  }
  std::string dtype_text() const {
    static const char* const names[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
    return text(code_ <= 6 ? names[code_] : "type ", int(bits_));
  }

  const char *op_, *name_;
  void* data_ = nullptr;
  uint8_t code_ = 0, bits_ = 0;
  std::vector<int64_t> shape_, strides_;
};

}  // namespace pydflash
