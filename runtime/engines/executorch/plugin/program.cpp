#include "program.h"

#include <executorch/runtime/backend/options.h>
#include <executorch/runtime/executor/memory_manager.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <utility>

#include "attention_op.h"
#include "core/error.h"
#include "log.h"

#if !defined(MAP_NORESERVE)
#define MAP_NORESERVE 0
#endif

namespace edge_qkv::et {
namespace {

namespace aten = executorch::aten;
namespace runtime = executorch::runtime;

constexpr const char* kMethod = "forward";
constexpr const char* kBackend = "XnnpackBackend";
constexpr size_t kMostBuffers = 16;
constexpr int64_t kMostBufferBytes = int64_t{1} << 40;
enum Input { kInputIds, kPast, kLogitRows, kInputs };

// One text from two reasons: what the function returned, and the first thing that was logged about it.
std::string reason(runtime::Error error) {
  const std::string logged = first_logged();
  return logged.empty() ? runtime::to_string(error) : logged;
}

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw Error(EQKV_BAD_PACKAGE, path + ": cannot be loaded by ExecuTorch: " + why +
                                    "; export the model again, or copy it again.");
}

aten::ScalarType scalar_type(const CacheLayout& layout, const CacheTensor& tensor) {
  if (tensor.scales) return aten::ScalarType::Half;
  // By CacheType.
  constexpr aten::ScalarType kTypes[] = {aten::ScalarType::Float, aten::ScalarType::Half,
                                         aten::ScalarType::Char};
  return kTypes[static_cast<int>(layout.type)];
}

// As export/executorch/program.py names them: kv_0, or key_0 and value_0, and after them their scales.
std::string cache_name(const CacheTensor& tensor) {
  return part_name(tensor) + "_" + std::to_string(tensor.layer);
}

template <class Sizes>
bool has_shape(const Sizes& sizes, const std::vector<int64_t>& wanted) {
  return sizes.size() == wanted.size() && std::equal(sizes.begin(), sizes.end(), wanted.begin());
}

}  // namespace

PlannedBuffer::PlannedBuffer(size_t bytes) : bytes_(bytes) {
  void* data = mmap(nullptr, std::max<size_t>(bytes, 1), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    throw Error(EQKV_OUT_OF_MEMORY, "There is no memory for the buffers of the program.");
  }
  data_ = static_cast<uint8_t*>(data);
#if defined(MADV_NOHUGEPAGE)
  // A huge page would commit 2 MiB of a buffer of which a token uses a few pages.
  madvise(data_, std::max<size_t>(bytes, 1), MADV_NOHUGEPAGE);
#endif
}

PlannedBuffer::PlannedBuffer(PlannedBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}

PlannedBuffer::~PlannedBuffer() {
  if (data_) munmap(data_, std::max<size_t>(bytes_, 1));
}

void PlannedBuffer::release() const { madvise(data_, std::max<size_t>(bytes_, 1), MADV_DONTNEED); }

LoadedProgram::LoadedProgram(const PluginRequest& request)
    : path_(request.path),
      layout_{request.cache_type, {request.tensors, request.tensors + request.tensor_count}},
      cache_rows_(request.cache_rows),
      vocab_size_(request.vocab_size),
      prefill_chunk_(request.prefill_chunk),
      threads_(request.threads),
      logits_(static_cast<size_t>(prefill_chunk_ * vocab_size_) * sizeof(float)) {
  try {
    load(request);
  } catch (const Aborted& aborted) {
    refuse(path_, aborted.what());
  }
}

void LoadedProgram::load(const PluginRequest& request) {
  auto loader = executorch::extension::MmapDataLoader::from(
      path_.c_str(), executorch::extension::MmapDataLoader::MlockConfig::NoMlock);
  if (!loader.ok()) refuse(path_, reason(loader.error()));
  loader_ = std::make_unique<executorch::extension::MmapDataLoader>(std::move(loader.get()));
  auto program =
      runtime::Program::load(loader_.get(), runtime::Program::Verification::InternalConsistency);
  if (!program.ok()) refuse(path_, reason(program.error()));
  program_ = std::make_unique<runtime::Program>(std::move(program.get()));
  check_interface();
  plan_memory();
  load_method(request);
  find_caches();
}

void LoadedProgram::check_interface() {
  const auto meta = program_->method_meta(kMethod);
  if (!meta.ok()) refuse(path_, reason(meta.error()));
  const auto check = [&](bool sound) {
    if (!sound) refuse(path_, "its inputs or outputs are not those that its description promises");
  };
  const struct {
    aten::ScalarType type;
    std::vector<int64_t> most;
  } wanted[] = {{aten::ScalarType::Long, {1, prefill_chunk_}},
                {aten::ScalarType::Long, {}},
                {aten::ScalarType::Long, {prefill_chunk_}}};
  check(meta->num_inputs() == kInputs && meta->num_outputs() == 1);
  for (size_t i = 0; i < kInputs; ++i) {
    const auto input = meta->input_tensor_meta(i);
    check(input.ok() && input->scalar_type() == wanted[i].type &&
          has_shape(input->sizes(), wanted[i].most) && !input->is_memory_planned());
  }
  const auto logits = meta->output_tensor_meta(0);
  check(logits.ok() && logits->scalar_type() == aten::ScalarType::Float &&
        has_shape(logits->sizes(), {1, prefill_chunk_, vocab_size_}) && !logits->is_memory_planned());
}

void LoadedProgram::plan_memory() {
  const auto meta = program_->method_meta(kMethod);
  const size_t count = meta->num_memory_planned_buffers();
  if (count > kMostBuffers) refuse(path_, "it has too many buffers");
  buffers_.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const auto bytes = meta->memory_planned_buffer_size(i);
    if (!bytes.ok() || bytes.get() < 0 || bytes.get() > kMostBufferBytes) {
      refuse(path_, "the size of a buffer is out of range");
    }
    buffers_.emplace_back(static_cast<size_t>(bytes.get()));
    spans_.push_back(buffers_.back().span());
  }
  planned_memory_ = std::make_unique<runtime::HierarchicalAllocator>(
      runtime::Span<runtime::Span<uint8_t>>(spans_.data(), spans_.size()));
  memory_ = std::make_unique<runtime::MemoryManager>(&method_memory_, planned_memory_.get(),
                                                     &temporary_memory_);
}

void LoadedProgram::load_method(const PluginRequest& request) {
  const char* packed = request.packed;
  const bool writes = packed && request.packed_file == PackedFile::kWrite;
  if (packed && std::strlen(packed) >= runtime::kMaxOptionValueLength) {
    throw Error(EQKV_INVALID_ARGUMENT, std::string(packed) +
                                           ": is a longer path than ExecuTorch takes; choose another "
                                           "directory for the packed weights.");
  }
  if (packed && !writes) {
    // XNNPACK maps the file, and then locks it for itself alone where nobody holds a lock: another
    // process would keep a copy of its own in memory. Where all hold this one, all map it and none
    // writes: neither over one that is damaged nor one that was removed meanwhile.
    packed_ = File(open(packed, O_RDONLY | O_CLOEXEC));
    if (!packed_ || flock(packed_.get(), LOCK_SH | LOCK_NB) != 0) packed = nullptr;
  }
  const auto set = [](runtime::Error error) {
    if (error == runtime::Error::Ok) return;
    throw Error(EQKV_ENGINE_FAILED,
                std::string("ExecuTorch refused an option: ") + runtime::to_string(error) + ".");
  };
  runtime::BackendOptions<3> options;
  constexpr int kWorkspacePerModel = 1;  // freed with the model, and shared by its parts
  set(options.set_option("workspace_sharing_mode", kWorkspacePerModel));
  if (packed) {
    set(options.set_option("weight_cache_enabled", true));
    set(options.set_option("packed_cache_path", packed));
  }
  runtime::LoadBackendOptionsMap map;
  set(map.set_options(kBackend, options.view()));
  auto method = program_->load_method(kMethod, memory_.get(), nullptr, nullptr, &map);
  if (!method.ok()) refuse(path_, reason(method.error()));
  method_ = std::make_unique<runtime::Method>(std::move(method.get()));
  // What cannot be written XNNPACK keeps in memory, and goes on.
  const std::string logged = first_logged();
  if (writes && !logged.empty()) throw Error(EQKV_ENGINE_FAILED, "ExecuTorch failed: " + logged + ".");
  took_packed_ = packed && !logged_repacking();
}

void LoadedProgram::find_caches() {
  for (const CacheTensor& tensor : layout_.tensors) {
    const std::string name = cache_name(tensor);
    const auto cache = method_->get_attribute(name);
    std::vector<int64_t> shape = {1, tensor.kv_heads, cache_rows_};
    if (!tensor.scales) shape.push_back(tensor.dim);
    if (!cache.ok() || cache->scalar_type() != scalar_type(layout_, tensor) ||
        !has_shape(cache->sizes(), shape)) {
      refuse(path_, "its cache " + name + " is not what its description promises");
    }
    caches_.push_back(cache->unsafeGetTensorImpl());
  }
}

void LoadedProgram::forward(const PluginCall& call) {
  if (broken_) {
    throw Error(EQKV_ENGINE_FAILED,
                "ExecuTorch gave up in an earlier evaluation of this model; open the model again.");
  }
  try {
    evaluate(call);
  } catch (const Aborted& aborted) {
    broken_ = true;  // it stands in the middle of an evaluation, and nothing takes it out of there
    throw Error(EQKV_ENGINE_FAILED,
                std::string("ExecuTorch failed: ") + aborted.what() + "; open the model again.");
  }
}

void LoadedProgram::evaluate(const PluginCall& call) {
  for (size_t i = 0; i < caches_.size(); ++i) caches_[i]->set_data(call.caches[i]);
  ids_.assign(call.tokens, call.tokens + call.count);
  rows_.resize(call.logit_rows);
  std::iota(rows_.begin(), rows_.end(), static_cast<int64_t>(call.count - call.logit_rows));
  int64_t past = call.past;

  using Sizes = aten::SizesType;
  Sizes ids_shape[] = {1, static_cast<Sizes>(call.count)};
  Sizes rows_shape[] = {static_cast<Sizes>(call.logit_rows)};
  aten::DimOrderType order[] = {0, 1};
  aten::TensorImpl inputs[] = {
      aten::TensorImpl(aten::ScalarType::Long, 2, ids_shape, ids_.data(), order),
      aten::TensorImpl(aten::ScalarType::Long, 0, nullptr, &past, nullptr),
      aten::TensorImpl(aten::ScalarType::Long, 1, rows_shape, rows_.data(), order)};
  std::string failure;
  const auto check = [&](runtime::Error error) {
    if (error == runtime::Error::Ok) return;
    throw Error(EQKV_ENGINE_FAILED,
                "ExecuTorch failed: " + (failure.empty() ? reason(error) + "." : failure));
  };
  for (size_t i = 0; i < kInputs; ++i) {
    check(method_->set_input(runtime::EValue(aten::Tensor(&inputs[i])), i));
  }
  // Room for the most rows that the program can give, whatever was asked for.
  check(method_->set_output_data_ptr(logits_.span().data(), logits_.span().size(), 0));
  const RunningCall running = {
      static_cast<size_t>(threads_), call.stop, &failure, call.caches, caches_.size(), &spans_};
  {
    const CallGuard guard(running);
    check(method_->execute());
  }

  const runtime::EValue& output = method_->get_output(0);
  const std::vector<int64_t> shape = {1, static_cast<int64_t>(call.logit_rows), vocab_size_};
  if (!output.isTensor() || !has_shape(output.toTensor().sizes(), shape)) {
    throw Error(EQKV_ENGINE_FAILED, "ExecuTorch failed: the logits have not the shape asked for.");
  }
  std::memcpy(call.logits, output.toTensor().const_data_ptr(),
              call.logit_rows * static_cast<size_t>(vocab_size_) * sizeof(float));
  if (call.logit_rows > 1) logits_.release();
}

void LoadedProgram::release_workspace() const {
  for (const PlannedBuffer& buffer : buffers_) buffer.release();
  logits_.release();
}

}  // namespace edge_qkv::et
