// Which engine a path belongs to: by the model file of a package, by the ending of a file.
#include <sys/stat.h>
#include <unistd.h>

#include "engines/engines.h"
#include "temporary.h"
#include "test.h"

using namespace edge_qkv;
using namespace edge_qkv::test;

TEST(no_package, "a directory without a model file, or with two, is refused with their names") {
  const TemporaryDirectory directory;
  EXPECT_ERROR(EQKV_BAD_PACKAGE, "is not a package: it holds no model.onnx or model.pte",
               describe_model(directory.path()));
  write_file(directory / "other.onnx", "x");
  EXPECT_ERROR(EQKV_BAD_PACKAGE, "is not a package", describe_model(directory.path() + "/"));
  write_file(directory / "model.onnx", "x");
  EXPECT_ERROR(EQKV_BAD_PACKAGE, directory / "model.onnx", describe_model(directory.path()));
  write_file(directory / "model.pte", "x");
  EXPECT_ERROR(EQKV_BAD_PACKAGE, "holds both model.onnx and model.pte",
               describe_model(directory.path()));
  EXPECT(unlink((directory / "model.onnx").c_str()) == 0);
  EXPECT_ERROR(EQKV_BAD_PACKAGE, directory / "model.pte", describe_model(directory.path()));
}

TEST(endings, "a file belongs to the engine whose ending it has") {
  const TemporaryDirectory directory;
  for (const char* name : {"model", "model.bin", "onnx", ".onnx.data", "model.onnx.data", "model.PTE"}) {
    write_file(directory / name, "x");
    EXPECT_ERROR(EQKV_BAD_PACKAGE, "is not a model file, whose name ends in .onnx or .pte",
                 describe_model(directory / name));
  }
  for (const char* name : {"a.onnx", "a.pte"}) {
    write_file(directory / name, "x");
    EXPECT_ERROR(EQKV_BAD_PACKAGE, directory / name, describe_model(directory / name));
  }
}

TEST(no_model_file, "what is no file is named") {
  const TemporaryDirectory directory;
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "is empty", describe_model(""));
  EXPECT_ERROR(EQKV_BAD_PACKAGE, "/absent/model.onnx: No such file",
               describe_model("/absent/model.onnx"));
  EXPECT_ERROR(EQKV_BAD_PACKAGE, "/dev/null: is not a file", describe_model("/dev/null"));
  EXPECT(mkfifo((directory / "pipe.onnx").c_str(), 0600) == 0);
  EXPECT_ERROR(EQKV_BAD_PACKAGE, "pipe.onnx: is not a file", describe_model(directory / "pipe.onnx"));
  EXPECT(mkdir((directory / "model.onnx").c_str(), 0700) == 0);
  EXPECT_ERROR(EQKV_BAD_PACKAGE, "model.onnx: is not a file", describe_model(directory.path()));
}
