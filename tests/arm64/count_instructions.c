// A qemu plugin that counts the instructions of a program and prints "instructions: N" to stderr at its end.
//
// Distributions ship no qemu-plugin.h: these are the functions of qemu's plugin interface that are used here, as its
// documentation describes them. They are the same in all its versions so far; VERSION is the one that a qemu asks for.
#include <stdint.h>
#include <stdio.h>

typedef uint64_t plugin_id;
struct qemu_plugin_tb; // a block of translated code
enum callback_flags { NO_REGISTERS };

size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb* block);
void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id id, void (*call)(plugin_id, struct qemu_plugin_tb*));
void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb* block, void (*call)(unsigned cpu, void* argument),
                                          enum callback_flags flags, void* argument);
void qemu_plugin_register_atexit_cb(plugin_id id, void (*call)(plugin_id, void* argument), void* argument);

int qemu_plugin_version = VERSION;

static uint64_t count; // of programs with one thread

static void block_runs(unsigned cpu, void* instructions) { count += (uintptr_t)instructions; }

static void block_is_translated(plugin_id id, struct qemu_plugin_tb* block) {
  qemu_plugin_register_vcpu_tb_exec_cb(block, block_runs, NO_REGISTERS, (void*)qemu_plugin_tb_n_insns(block));
}

static void program_ends(plugin_id id, void* argument) {
  fprintf(stderr, "instructions: %llu\n", (unsigned long long)count);
}

int qemu_plugin_install(plugin_id id, const void* info, int argc, char** argv) {
  qemu_plugin_register_vcpu_tb_trans_cb(id, block_is_translated);
  qemu_plugin_register_atexit_cb(id, program_ends, NULL);
  return 0;
}
