# Debian's and Ubuntu's cross compiler for 64-bit ARM. What is built runs under qemu: QEMU_CPU says on which processor,
# QEMU_LD_PREFIX where arm64's C library is.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
