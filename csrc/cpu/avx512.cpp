// Compiled with -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma.
#if defined(__x86_64__)
#define CHUNKMEM_LEVEL avx512
#include "tile.h"
#endif
