/* Whether AMX works here: ends with 0 where a tile can be loaded. Some virtual machines announce AMX and have none, and
 * compilers ask the processor: there this ends by SIGILL. Linux grants the tiles on request only. */
#include <immintrin.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };

__attribute__((target("amx-tile,amx-int8"))) int main(void) {
  unsigned char shape[64] = {0}, rows[16][64];
  int sums[16][16];
  if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) != 0) return 1;
  shape[0] = 1; /* palette; then bytes a row of tiles 0 to 2, and their rows */
  shape[16] = shape[18] = shape[20] = 64;
  shape[48] = shape[49] = shape[50] = 16;
  memset(rows, 1, sizeof rows);
  _tile_loadconfig(shape);
  _tile_zero(0);
  _tile_loadd(1, rows, 64);
  _tile_loadd(2, rows, 64);
  _tile_dpbssd(0, 1, 2);
  _tile_stored(0, sums, 64);
  _tile_release();
  return sums[15][15] == 64 ? 0 : 2;
}
