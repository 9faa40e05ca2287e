# CMake generated Testfile for 
# Source directory: /tmp/wt-cache/runtime/tests
# Build directory: /tmp/wt-cache/build-asan/runtime/tests
# 
# This file includes the relevant testing commands required for 
# testing this directory and lists subdirectories to be tested as well.
add_test("attention" "/tmp/wt-cache/build-asan/attention_test")
set_tests_properties("attention" PROPERTIES  _BACKTRACE_TRIPLES "/tmp/wt-cache/runtime/tests/CMakeLists.txt;6;add_test;/tmp/wt-cache/runtime/tests/CMakeLists.txt;0;")
add_test("core" "/tmp/wt-cache/build-asan/core_test")
set_tests_properties("core" PROPERTIES  _BACKTRACE_TRIPLES "/tmp/wt-cache/runtime/tests/CMakeLists.txt;11;add_test;/tmp/wt-cache/runtime/tests/CMakeLists.txt;0;")
