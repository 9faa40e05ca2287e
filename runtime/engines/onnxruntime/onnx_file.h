// What an ONNX file says of itself, read without ONNX Runtime and without the weights.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace edge_qkv::ort {

struct OnnxFile {
  std::map<std::string, std::string>
      metadata;        // the entries whose keys begin with "edge_qkv.", without that
  uint64_t bytes = 0;  // of the file and of the weights beside it
};

// Walks the top level of the file (ModelProto of onnx.proto): the graph is skipped by its length.
// Nothing in it is trusted. Throws Error with EQKV_BAD_PACKAGE.
OnnxFile read_onnx_file(const std::string& path);

}  // namespace edge_qkv::ort
