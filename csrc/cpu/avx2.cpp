// Compiled with -mavx2 -mfma.
#if defined(__x86_64__)
#define CHUNKMEM_LEVEL avx2
#include "tile.h"
#endif
