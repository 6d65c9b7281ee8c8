// What every processor of the architecture can do.
#define CHUNKMEM_LEVEL baseline
#include "tile.h"
