// What the files of the C ABI share: statuses and the last error, and structs that grow.
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "core/error.h"
#include "core/message.h"

namespace edge_qkv {

// Plain memory: it needs no destructor, so a thread may end after the library was closed.
inline thread_local char last_error[1024] = "";

inline eqkv_status keep(eqkv_status status, const char* sentence) noexcept {
  copy_message(sentence, last_error, sizeof last_error);
  return status;
}

template <class Function>
eqkv_status guarded(Function function) noexcept {
  try {
    function();
    return EQKV_OK;
  } catch (const Error& error) {
    return keep(error.status(), error.what());
  } catch (const std::bad_alloc&) {
    return keep(EQKV_OUT_OF_MEMORY, "There is not enough memory.");
  } catch (const std::length_error&) {
    return keep(EQKV_OUT_OF_MEMORY, "There is not enough memory.");
  } catch (const std::exception& error) {
    return keep(EQKV_ENGINE_FAILED, error.what());
  } catch (...) {
    return keep(EQKV_ENGINE_FAILED, "An unknown error occurred.");
  }
}

template <class Pointer>
void require(Pointer pointer, const char* name) {
  if (!pointer) throw Error(EQKV_INVALID_ARGUMENT, std::string("The argument ") + name + " is null.");
}

// A struct_size beyond this is no newer version but an uninitialised struct.
inline constexpr size_t kMostStructBytes = 4096;

template <class Struct>
size_t struct_size(const Struct* given) {
  const size_t size = given->struct_size;
  // Every version of a struct has whole alignments: a size between two fields is none.
  if (size < sizeof size || size > kMostStructBytes || size % alignof(Struct) != 0) {
    throw Error(EQKV_INVALID_ARGUMENT, "struct_size is not set; set it to sizeof the struct.");
  }
  return size;
}

// Options of a caller that may be older (fields it does not know keep `defaults`) or newer (fields that
// we do not know must be zero: an option is refused rather than ignored).
template <class Struct>
Struct read_options(const Struct* given, Struct defaults) {
  const size_t size = struct_size(given);
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  if (std::any_of(bytes + std::min(size, sizeof defaults), bytes + size,
                  [](unsigned char b) { return b; })) {
    throw Error(EQKV_INVALID_ARGUMENT, "The caller sets an option that this version of edge-qkv lacks.");
  }
  std::memcpy(&defaults, given, std::min(size, sizeof defaults));
  return defaults;
}

// As much of `info` as the caller knows, and zeros where it knows more.
template <class Struct>
void write_info(Struct* out, Struct info) {
  const size_t size = struct_size(out);
  info.struct_size = size;
  std::memset(reinterpret_cast<void*>(out), 0, size);
  std::memcpy(reinterpret_cast<void*>(out), &info, std::min(size, sizeof info));
}

}  // namespace edge_qkv
