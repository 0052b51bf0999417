// The bfloat16 products of this unit: of one block of rows with a panel of weights, and those of attention.
#pragma once

#if defined(__AMX_TILE__)
#include "attention_amx.h"
#include "gemm_amx.h"
#else
#include "attention_dot.h"
#include "gemm_dot.h"
#endif
