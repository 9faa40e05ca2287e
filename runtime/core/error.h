// The one exception of the runtime. The C ABI turns it into its status and keeps its sentence.
#pragma once

#include <stdexcept>
#include <string>

#include "edge_qkv.h"

namespace edge_qkv {

class Error : public std::runtime_error {
 public:
  Error(eqkv_status status, const std::string& sentence)
      : std::runtime_error(sentence), status_(status) {}
  eqkv_status status() const { return status_; }

 private:
  eqkv_status status_;
};

}  // namespace edge_qkv
