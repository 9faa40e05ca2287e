# libedge_qkv_executorch: the part of the ExecuTorch engine that is compiled against ExecuTorch, as the PyPI
# package `executorch` brings it. EDGE_QKV_EXECUTORCH says whether to build it: AUTO where it is found.
set(EDGE_QKV_EXECUTORCH AUTO CACHE STRING "Build the ExecuTorch engine: ON, OFF, or AUTO where ExecuTorch is found")
set_property(CACHE EDGE_QKV_EXECUTORCH PROPERTY STRINGS AUTO ON OFF)
if(NOT EDGE_QKV_EXECUTORCH)
  return()
endif()

# Parts of it that are used are no stable interface: its releases are taken as they were tried.
set(_versions 1.5...<1.6)
set(_problem "")
if(CMAKE_VERSION VERSION_LESS 3.28)  # which its targets need
  set(_problem "CMake ${CMAKE_VERSION} is too old for it, 3.28 is needed")
else()
  # pip builds in an environment of its own, in which nothing that is installed is seen: the interpreter is asked
  # where packages are.
  if(Python_EXECUTABLE)
    execute_process(
      COMMAND ${Python_EXECUTABLE} -I -c
              "import site, sysconfig; print(sysconfig.get_path('platlib'), site.getusersitepackages(), sep=';')"
      OUTPUT_VARIABLE _packages OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    list(TRANSFORM _packages APPEND /executorch)
  endif()
  find_package(executorch ${_versions} CONFIG QUIET HINTS ${_packages})
  foreach(_target runtime kernels_optimized backend_xnnpack threadpool)
    if(NOT TARGET executorch::${_target})
      set(_problem "version ${_versions} of the package executorch was not found")
      if(executorch_CONSIDERED_VERSIONS)
        string(APPEND _problem ", only ${executorch_CONSIDERED_VERSIONS}")
      endif()
    endif()
  endforeach()
endif()
if(_problem AND EDGE_QKV_EXECUTORCH STREQUAL "AUTO")
  message(STATUS "Building without the ExecuTorch engine: ${_problem}")
  return()
elseif(_problem)
  message(FATAL_ERROR "The ExecuTorch engine cannot be built: ${_problem}. Install the package, or give "
    "-DCMAKE_PREFIX_PATH=<site-packages>/executorch.")
endif()
message(STATUS "Building the ExecuTorch engine for ExecuTorch ${EXECUTORCH_BUILD_VERSION}")

add_library(edge_qkv_executorch SHARED
  runtime/core/file.cpp
  runtime/core/layout.cpp
  runtime/engines/operator.cpp
  runtime/engines/executorch/plugin/attention_op.cpp
  runtime/engines/executorch/plugin/log.cpp
  runtime/engines/executorch/plugin/plugin.cpp
  runtime/engines/executorch/plugin/program.cpp)
target_include_directories(edge_qkv_executorch PRIVATE runtime runtime/include)
target_compile_definitions(edge_qkv_executorch PRIVATE EDGE_QKV_EXECUTORCH_VERSION="${EXECUTORCH_BUILD_VERSION}")
target_link_libraries(edge_qkv_executorch PRIVATE edge_qkv_kernel executorch::runtime executorch::kernels_optimized
  executorch::backend_xnnpack executorch::threadpool ${CMAKE_DL_LIBS})
# The ExecuTorch of the environment that both are installed in comes first; the one it was built with where there is
# none. The paths that the imported targets bring would come before either.
foreach(_target runtime kernels_optimized backend_xnnpack threadpool)
  get_target_property(_options executorch::${_target} INTERFACE_LINK_OPTIONS)
  if(_options)
    list(FILTER _options EXCLUDE REGEX "rpath")
    set_property(TARGET executorch::${_target} PROPERTY INTERFACE_LINK_OPTIONS "${_options}")
  endif()
endforeach()
set(_beside "$ORIGIN/../../executorch/lib")
if(APPLE)
  set(_beside "@loader_path/../../executorch/lib")
endif()
get_filename_component(_built_with "${EXECUTORCH_RUNTIME_LIBRARY_DIR}" REALPATH)
set_target_properties(edge_qkv_executorch PROPERTIES
  BUILD_RPATH "${_built_with}" INSTALL_RPATH "${_beside};${_built_with}")
if(NOT APPLE)
  set(_exports ${CMAKE_CURRENT_SOURCE_DIR}/runtime/engines/executorch/plugin/exports.map)
  target_link_options(edge_qkv_executorch PRIVATE -Wl,--version-script,${_exports} -Wl,--gc-sections
    -Wl,-z,relro,-z,now,-z,noexecstack)
  set_target_properties(edge_qkv_executorch PROPERTIES LINK_DEPENDS ${_exports})
endif()
install(TARGETS edge_qkv_executorch LIBRARY DESTINATION edge_qkv/lib RUNTIME DESTINATION edge_qkv/lib)
