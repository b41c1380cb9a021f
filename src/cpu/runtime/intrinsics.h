// The intrinsics of x86, for a loop that the compiler does not vectorize by itself. GCC 12 warns of
// variables in its own header that are undefined by intention (its bug 105593): no file that
// includes this one is warned of such.
#pragma once
#ifdef __x86_64__
#include <immintrin.h>
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#endif
