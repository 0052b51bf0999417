// The parts that a unit is made of, chosen by the instruction sets that it is compiled for: how activations lie in memory,
// and the products of one block. A header that needs one of them includes this file, so headers may be included in any
// order. UNIT_MULTIPLIES_BF16 says which of the two families the unit belongs to.
#pragma once

#if defined(__AMX_TILE__) || defined(__AVX512BF16__)
#define UNIT_MULTIPLIES_BF16 1
#include "activation_tiles.h"
#else
#define UNIT_MULTIPLIES_BF16 0
#include "activation_rows.h"
#endif
