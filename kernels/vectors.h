/* What the kernels for a CPU have in common: vectors of floats, and how stored values become such.
 *
 * Values are widened to float as they are read, and sums are kept in float, whatever is stored: reading is what takes
 * the time. All arrays are dense and row after row; sizes count elements. */

#pragma once

#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Each function that takes a kind is made anew for each of them: told apart in an inner loop, they would cost more than
 * the loop. */
#define SPECIAL static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float quad __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

/* LANES values in memory as floats or integers, each by one instruction on x86: not all compilers find it when it is
 * written as a conversion, and to read the header of their names for it takes as long as to compile a third of this. */
#if defined(__AVX2__) && defined(__F16C__)
#define ONE(name, type, instruction, size)                                            \
    SPECIAL type name(const void *p) {                                                \
        type v;                                                                       \
        __asm__(instruction " %1, %0" : "=v"(v) : "m"(*(const char(*)[size * LANES])p)); \
        return v;                                                                     \
    }
ONE(halves, vec, "vcvtph2ps", 2)
ONE(shorts, ints, "vpmovzxwd", 2)
ONE(chars, ints, "vpmovsxbd", 1)
ONE(bytes, ints, "vpmovzxbd", 1)
SPECIAL uint16_t half(float f) {
    int32_t __attribute__((vector_size(16))) bits;
    __asm__("vcvtps2ph $0, %1, %0" : "=x"(bits) : "x"((quad){f}));
    return bits[0];
}
SPECIAL quad pairs(quad a, quad b) {
    __asm__("vhaddps %2, %1, %0" : "=x"(a) : "x"(a), "x"(b));
    return a;
}
SPECIAL quad sums(quad a, quad b, quad c, quad d) { return pairs(pairs(a, b), pairs(c, d)); }
#else
#define EACH(type, all, of) all v; const type *q = of; for (int i = 0; i < LANES; i++) v[i] = q[i]; return v
SPECIAL vec halves(const void *p) { EACH(_Float16, vec, p); }
SPECIAL ints shorts(const void *p) { EACH(uint16_t, ints, p); }
SPECIAL ints chars(const void *p) { EACH(int8_t, ints, p); }
SPECIAL ints bytes(const void *p) { EACH(uint8_t, ints, p); }
SPECIAL uint16_t half(float f) {
    const _Float16 rounded = f;
    uint16_t bits;
    memcpy(&bits, &rounded, sizeof bits);
    return bits;
}
SPECIAL float of(quad q) { return (q[0] + q[1]) + (q[2] + q[3]); }
SPECIAL quad sums(quad a, quad b, quad c, quad d) { return (quad){of(a), of(b), of(c), of(d)}; }
#endif

SPECIAL vec floats(ints i) { return __builtin_convertvector(i, vec); }

enum kind { F32, F16, BF16, I8, I4, U8, U4 }; /* of stored values: of weights, and of K and V */
enum ending { SET, ADD, SWIGLU };             /* what becomes of a product */

/* Something to be done, by all threads of a region together: each kind of it begins so, and goes on with what `run` wants
 * to know. They leave `run` together too, when all of it is done. */
struct job { void (*run)(const struct job *); };

static const int size_of[] = {4, 2, 2, 1, 0, 1, 1};

SPECIAL long padded(long n) { return (n + LANES - 1) / LANES * LANES; }

SPECIAL quad fold(vec v) {
    quad parts[LANES / 4];
    memcpy(parts, &v, sizeof v);
    for (int i = 1; i < LANES / 4; i++) parts[0] += parts[i];
    return parts[0];
}

SPECIAL float sum(vec v) {
    const quad four = fold(v);
    return (four[0] + four[1]) + (four[2] + four[3]);
}

SPECIAL quad sums_of(const vec v[4]) { return sums(fold(v[0]), fold(v[1]), fold(v[2]), fold(v[3])); }

SPECIAL vec load(const void *from, enum kind kind) {
    vec v;
    switch (kind) {
    case F16: return halves(from);
    case BF16: return (vec)(shorts(from) << 16); /* the upper half of a float */
    case I8: return floats(chars(from));
    case U8: return floats(bytes(from));
    default: memcpy(&v, from, sizeof v); return v;
    }
}

/* The same where fewer than LANES values are left. */
SPECIAL vec load_rest(const void *from, enum kind kind, long n) {
    char all[sizeof(vec)] = {0};
    memcpy(all, from, n * size_of[kind]);
    return load(all, kind);
}

/* Into floats, followed by zeros up to a multiple of LANES. */
SPECIAL void widen(float *to, const void *from, enum kind kind, long n) {
    long i = 0;
    for (; i + LANES <= n; i += LANES) {
        vec v = load((const char *)from + i * size_of[kind], kind);
        memcpy(to + i, &v, sizeof v);
    }
    if (i < n) {
        vec v = load_rest((const char *)from + i * size_of[kind], kind, n - i);
        memcpy(to + i, &v, sizeof v);
    }
}

/* e^x for -87 <= x <= 88, to a few units in the last place: 2^whole · e^part, the second by its Taylor series. */
SPECIAL float exponential(float x) {
    x = x < -87 ? -87 : x > 88 ? 88 : x;
    float whole = x * 1.44269504f + 12582912.f - 12582912.f; /* rounded, as 1.5 · 2^23 leaves no bits below 1 */
    float part = x - whole * 0.693359375f + whole * 2.12194440e-4f; /* x - whole · ln 2, which has more digits */
    float power = 1 + part * (1.f / 6);
    power = 1 + part * (1.f / 5) * power;
    power = 1 + part * (1.f / 4) * power;
    power = 1 + part * (1.f / 3) * power;
    power = 1 + part * (1.f / 2) * power;
    power = 1 + part * power;
    int32_t bits = ((int32_t)whole + 127) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return scale * power;
}

SPECIAL float root(float x) { return __builtin_sqrtf(x); }
