// 16- and 8-bit floats: conversion to float32, and from it rounded to nearest, ties to even. Needs no CUDA header.

#ifndef INFINITY
#define INFINITY __uint_as_float(0x7f800000)
#endif

struct bfloat16 { unsigned short bits; };
struct float16 { unsigned short bits; };
struct float8_e4m3fn { unsigned char bits; };
struct float8_e5m2 { unsigned char bits; };
typedef float float32;

__device__ inline float to_float(float x) { return x; }

__device__ inline float to_float(bfloat16 x) { return __uint_as_float(unsigned(x.bits) << 16); }

__device__ inline float to_float(float16 x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
#else
    return float(__builtin_bit_cast(_Float16, x.bits));
#endif
}

// Moves exponent and fraction to those of a float32, then adds 120 to the exponent by a product; exact for subnormals too.
__device__ inline float to_float(float8_e4m3fn x) {
    unsigned magnitude = x.bits & 0x7f;
    float y = magnitude == 0x7f ? __uint_as_float(0x7fc00000) : __uint_as_float(magnitude << 20) * 0x1p120f;
    return x.bits & 0x80 ? -y : y;
}

__device__ inline float to_float(float8_e5m2 x) { return to_float(float16{(unsigned short)(x.bits << 8)}); }

__device__ inline void store(float &y, float x) { y = x; }

__device__ inline void store(bfloat16 &y, float x) {
    unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffff) > 0x7f800000)
        y.bits = 0x7fc0;
    else
        y.bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

__device__ inline void store(float16 &y, float x) {
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    y.bits = __builtin_bit_cast(unsigned short, _Float16(x));
#endif
}

// COUNT adjacent elements, loaded and stored by one instruction; aligned to their size.
template <class Element, int COUNT> struct alignas(sizeof(Element) * COUNT) Pack {
    Element elements[COUNT];
};

// Returns the sum over a warp, the same in all lanes.
__device__ inline float sum_of_warp(float x) {
    for (int mask = 16; mask; mask /= 2)
        x += __shfl_xor_sync(0xffffffff, x, mask);
    return x;
}
