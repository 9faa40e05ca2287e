// What an ONNX file says of itself, read without ONNX Runtime and without the weights.
#pragma once

#include <string>

#include "engines/metadata.h"

namespace edge_qkv::ort {

// Walks the top level of the file (ModelProto of onnx.proto): the graph is skipped by its length.
// Nothing in it is trusted. Throws Error with EQKV_BAD_PACKAGE.
FileMetadata read_onnx_file(const std::string& path);

}  // namespace edge_qkv::ort
