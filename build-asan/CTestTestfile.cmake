# CMake generated Testfile for 
# Source directory: /tmp/wt-cache
# Build directory: /tmp/wt-cache/build-asan
# 
# This file includes the relevant testing commands required for 
# testing this directory and lists subdirectories to be tested as well.
subdirs("runtime/tests")
