// Owners of ONNX Runtime's objects.
#pragma once

#include <memory>

#include "ort_api.h"

namespace edge_qkv::ort {

template <class T>
using Handle = std::unique_ptr<T, void (*)(T*)>;

// Owns what `make(T**)` makes; `make` throws where it fails.
template <class T, class Make>
Handle<T> make_handle(void (*release)(T*), Make make) {
  T* object = nullptr;
  make(&object);
  return Handle<T>(object, release);
}

}  // namespace edge_qkv::ort
