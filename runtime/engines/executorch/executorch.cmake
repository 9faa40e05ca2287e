# libedge_qkv_executorch: the part of the ExecuTorch engine that is compiled against ExecuTorch, as the PyPI
# package `executorch` brings it. EDGE_QKV_EXECUTORCH says whether to build it: AUTO where it is found.
#
# pip builds in an environment of its own, in which nothing that is installed is seen: the interpreter is asked
# where packages are.
set(EDGE_QKV_EXECUTORCH AUTO CACHE STRING "Build the ExecuTorch engine: ON, OFF, or AUTO where ExecuTorch is found")
set_property(CACHE EDGE_QKV_EXECUTORCH PROPERTY STRINGS AUTO ON OFF)
if(NOT EDGE_QKV_EXECUTORCH)
  return()
endif()

if(Python_EXECUTABLE)
  execute_process(COMMAND ${Python_EXECUTABLE} -I -c "import sysconfig; print(sysconfig.get_path('platlib'))"
    OUTPUT_VARIABLE _packages OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(CMAKE_VERSION VERSION_GREATER_EQUAL 3.28)  # what its targets need
  find_package(executorch CONFIG QUIET HINTS "${_packages}/executorch")
endif()
foreach(_target runtime kernels_optimized backend_xnnpack threadpool)
  if(NOT TARGET executorch::${_target})
    if(EDGE_QKV_EXECUTORCH STREQUAL "AUTO")
      message(STATUS "ExecuTorch was not found: building without its engine")
      return()
    endif()
    message(FATAL_ERROR "ExecuTorch was not found (executorch::${_target}). Install the package executorch and "
      "CMake 3.28 or newer, or give -DCMAKE_PREFIX_PATH=<site-packages>/executorch.")
  endif()
endforeach()
message(STATUS "Building the ExecuTorch engine for ExecuTorch ${EXECUTORCH_BUILD_VERSION}")

add_library(edge_qkv_executorch SHARED
  runtime/core/file.cpp
  runtime/engines/operator.cpp
  runtime/engines/executorch/plugin/attention_op.cpp
  runtime/engines/executorch/plugin/log.cpp
  runtime/engines/executorch/plugin/plugin.cpp
  runtime/engines/executorch/plugin/program.cpp)
target_include_directories(edge_qkv_executorch PRIVATE runtime runtime/include)
target_compile_definitions(edge_qkv_executorch PRIVATE EDGE_QKV_EXECUTORCH_VERSION="${EXECUTORCH_BUILD_VERSION}")
target_link_libraries(edge_qkv_executorch PRIVATE edge_qkv_kernel executorch::runtime executorch::kernels_optimized
  executorch::backend_xnnpack executorch::threadpool ${CMAKE_DL_LIBS})
set(_beside "$ORIGIN/../../executorch/lib")
if(APPLE)
  set(_beside "@loader_path/../../executorch/lib")
endif()
set_target_properties(edge_qkv_executorch PROPERTIES
  INSTALL_RPATH "${_beside};${EXECUTORCH_RUNTIME_LIBRARY_DIR}")
install(TARGETS edge_qkv_executorch LIBRARY DESTINATION edge_qkv/lib RUNTIME DESTINATION edge_qkv/lib)
