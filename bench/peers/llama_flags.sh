#!/bin/sh
# Prints the compiler flags that llama.cpp needs here: those against AMX, where it does not work and the compiler knows it.
flags="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
works() { ${CC:-cc} -O1 -o "$folder/amx" "$(dirname "$0")/amx.c" && "$folder/amx"; }
knows() { echo 'int x;' | ${CC:-cc} $flags -x c -c -o "$folder/x.o" -; }
if ! (works) >/dev/null 2>&1 && (knows) >/dev/null 2>&1; then echo "$flags"; fi
