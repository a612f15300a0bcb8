/* A part of the library: products with weights of one number format, TS_FORMAT. */
#include "cpu_int.h"

#define DEFINED(name) INT_TILE(name, 0)
DEFINED(TS_FORMAT)
