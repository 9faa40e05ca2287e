// What an ExecuTorch program says of itself, read without ExecuTorch and without the weights.
#pragma once

#include <string>

#include "engines/metadata.h"

namespace edge_qkv::et {

// Reads the header of the file (a flatbuffer, Program of ExecuTorch's program.fbs), the names of its
// methods, one of which is "forward", and the constant text that each of ours returns: with pread, piece
// by piece, so that a file that shrinks meanwhile is refused as well. Nothing in it is trusted. Throws
// Error with EQKV_BAD_PACKAGE.
FileMetadata read_pte_file(const std::string& path);

}  // namespace edge_qkv::et
