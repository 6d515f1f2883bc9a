/* What a decode step on a CPU spends its time on, for a few tokens at once: products with matrices of weights, the
 * turning of q and k, and the attention of one query. native.py compiles it and says what the arguments are.
 *
 * Values are widened to float as they are read, and sums are kept in float, whatever the weights are: reading them is
 * what takes the time. All arrays are dense and row after row; sizes count elements. */

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
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

/* LANES values in memory as floats or integers. Compilers know that on x86 each is one instruction, but not all of them
 * when it is written as a conversion. */
#if defined(__AVX512F__)
#include <immintrin.h>
SPECIAL vec halves(const void *p) { return (vec)_mm512_cvtph_ps(_mm256_loadu_si256(p)); }
SPECIAL ints shorts(const void *p) { return (ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)); }
SPECIAL ints chars(const void *p) { return (ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(p)); }
SPECIAL ints bytes(const void *p) { return (ints)_mm512_cvtepu8_epi32(_mm_loadu_si128(p)); }
SPECIAL vec floats(ints i) { return (vec)_mm512_cvtepi32_ps((__m512i)i); }
SPECIAL uint16_t half(float f) { return _cvtss_sh(f, 0); }
#elif defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
SPECIAL vec halves(const void *p) { return (vec)_mm256_cvtph_ps(_mm_loadu_si128(p)); }
SPECIAL ints shorts(const void *p) { return (ints)_mm256_cvtepu16_epi32(_mm_loadu_si128(p)); }
SPECIAL ints chars(const void *p) { return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(p)); }
SPECIAL ints bytes(const void *p) { return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(p)); }
SPECIAL vec floats(ints i) { return (vec)_mm256_cvtepi32_ps((__m256i)i); }
SPECIAL uint16_t half(float f) { return _cvtss_sh(f, 0); }
#else
#define EACH(type, all, of) all v; const type *q = of; for (int i = 0; i < LANES; i++) v[i] = q[i]; return v
SPECIAL vec halves(const void *p) { EACH(_Float16, vec, p); }
SPECIAL ints shorts(const void *p) { EACH(uint16_t, ints, p); }
SPECIAL ints chars(const void *p) { EACH(int8_t, ints, p); }
SPECIAL ints bytes(const void *p) { EACH(uint8_t, ints, p); }
SPECIAL vec floats(ints n) { return __builtin_convertvector(n, vec); }
SPECIAL uint16_t half(float f) {
    const _Float16 rounded = f;
    uint16_t bits;
    memcpy(&bits, &rounded, sizeof bits);
    return bits;
}
#endif

enum kind { F32, F16, BF16, I8, I4 };     /* of stored values */
enum ending { SET, ADD, SWIGLU };         /* what becomes of a product */

static const int size_of[] = {4, 2, 2, 1};

SPECIAL long padded(long n) { return (n + LANES - 1) / LANES * LANES; }

SPECIAL float sum(vec v) {
    typedef float quad __attribute__((vector_size(16)));
    quad parts[LANES / 4];
    memcpy(parts, &v, sizeof v);
    for (int i = 1; i < LANES / 4; i++) parts[0] += parts[i];
    return (parts[0][0] + parts[0][1]) + (parts[0][2] + parts[0][3]);
}

SPECIAL vec load(const void *from, enum kind kind) {
    vec v;
    switch (kind) {
    case F16: return halves(from);
    case BF16: return (vec)(shorts(from) << 16); /* the upper half of a float */
    case I8: return floats(chars(from));
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

/* The inverse, rounded to the nearest. */
SPECIAL void narrow(void *to, const float *from, enum kind kind, long n) {
    for (long i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, from + i, sizeof bits);
        switch (kind) {
        case F32: ((float *)to)[i] = from[i]; break;
        case BF16: /* half of what is cut off is added, to the even one; what is not a number remains that */
            ((uint16_t *)to)[i] = from[i] != from[i] ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
            break;
        default: ((uint16_t *)to)[i] = half(from[i]);
        }
    }
}

/* w · x, x being followed by zeros up to the next multiple of LANES. */
SPECIAL float dot(const void *w, enum kind kind, const float *x, long n) {
    const char *from = w;
    const int step = LANES * size_of[kind];
    vec a = {0}, b = {0}, c = {0}, d = {0};
    long i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES, from += 4 * step) {
        a += load(from, kind) * load(x + i, F32);
        b += load(from + step, kind) * load(x + i + LANES, F32);
        c += load(from + 2 * step, kind) * load(x + i + 2 * LANES, F32);
        d += load(from + 3 * step, kind) * load(x + i + 3 * LANES, F32);
    }
    for (; i + LANES <= n; i += LANES, from += step) a += load(from, kind) * load(x + i, F32);
    if (i < n) b += load_rest(from, kind, n - i) * load(x + i, F32);
    return sum((a + b) + (c + d));
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

static void rms_norm(float *y, const float *x, const float *weight, float eps, long n) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (long i = 0; i < n; i++) squares += x[i] * x[i];
    float scale = 1 / root(squares / n + eps);
    for (long i = 0; i < n; i++) y[i] = x[i] * scale * weight[i];
}

/* ---- products ---- */

#define PIECE 16 /* outputs */
#define ROWS 2
#define TOKENS 4

/* y [TOKENS, ROWS] of as many rows of w, size bytes apart, and of x, width apart. What is loaded serves several
 * products, so that it is the multiplying that takes the time. */
SPECIAL void tile(float y[TOKENS][ROWS], const char *w, long size, enum kind kind, const float *x, long width,
                        long n) {
    vec sums[TOKENS][ROWS] = {0};
    for (long i = 0; i < n; i += LANES) {
        const char *at = w + i * size_of[kind];
        const long rest = n - i;
        const vec a = rest < LANES ? load_rest(at, kind, rest) : load(at, kind);
        const vec b = rest < LANES ? load_rest(at + size, kind, rest) : load(at + size, kind);
#pragma GCC unroll 4
        for (int t = 0; t < TOKENS; t++) {
            const vec token = load(x + t * width + i, F32);
            sums[t][0] += a * token;
            sums[t][1] += b * token;
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < TOKENS; t++)
        for (int r = 0; r < ROWS; r++) y[t][r] = sum(sums[t][r]);
}

/* Outputs first to last (not included) of x [T, n] times weightᵀ. x has zeros behind each row up to a multiple of
 * LANES, and rows of zeros up to a multiple of TOKENS unless T is 1. */
SPECIAL void rows_of(float *y, const float *x, long T, const void *weight, enum kind kind, const float *steps,
                           long first, long last, long outputs, long n) {
    const long width = padded(n), row_size = n * size_of[kind];
    const char *w = (const char *)weight + first * row_size;
    if (T == 1) {
        for (long row = first; row < last; row++, w += row_size) y[row] = dot(w, kind, x, n) * (steps ? steps[row] : 1);
        return;
    }
    float products[TOKENS][ROWS], made[TOKENS][PIECE];
    for (long t = 0; t < T; t += TOKENS) { /* these stay near while the rows pass */
        for (long row = first; row < last; row += ROWS) {
            const int odd = last - row == 1; /* then it is taken twice */
            tile(products, w + (row - first) * row_size, odd ? 0 : row_size, kind, x + t * width, width, n);
            for (long i = 0; i < TOKENS; i++)
                for (long r = 0; r < ROWS - odd; r++)
                    made[i][row - first + r] = products[i][r] * (steps ? steps[row + r] : 1);
        }
        for (long i = 0; i < TOKENS && t + i < T; i++) /* one line of the processor's cache for each token */
            memcpy(y + (t + i) * outputs + first, made[i], (last - first) * sizeof *y);
    }
}

/* The same for a block of 4 · LANES outputs in 4 bits, as torch's kernel for CPUs has them: input after input, and in
 * a byte one output of the block's first half below and one of the second above; steps [n / 32, outputs] hold a step
 * below and a middle above, each a bfloat16. */
#define AHEAD 8
static void block_of(float *y, const float *x, long T, const uint8_t *packed, const uint32_t *steps, long block,
                     long outputs, long n) {
    const long first = block * 4 * LANES, groups = n / 32;
    packed += block * 2 * LANES * n;
    for (long t = 0; t < T; t++, x += padded(n)) {
        vec total[4] = {0};
        for (long group = 0; group < groups; group++) {
            vec part[4] = {0};
            float all = 0;
            const long next = group + AHEAD < groups ? group + AHEAD : group + AHEAD - groups; /* far from here */
            const uint32_t *soon = steps + next * outputs + first + (next < group ? 4 * LANES : 0);
            for (int j = 0; j < 4; j++) __builtin_prefetch(soon + j * LANES);
            for (long i = group * 32; i < group * 32 + 32; i++) {
                const ints pair[] = {bytes(packed + 2 * i * LANES), bytes(packed + (2 * i + 1) * LANES)};
                part[0] += x[i] * floats(pair[0] & 15);
                part[1] += x[i] * floats(pair[1] & 15);
                part[2] += x[i] * floats(pair[0] >> 4);
                part[3] += x[i] * floats(pair[1] >> 4);
                all += x[i];
            }
            for (int j = 0; j < 4; j++) {
                ints both;
                memcpy(&both, steps + group * outputs + first + j * LANES, sizeof both);
                total[j] += (part[j] - 8 * all) * (vec)(both << 16) + all * (vec)(both & (int32_t)0xffff0000);
            }
        }
        memcpy(y + t * outputs + first, total, sizeof total);
    }
}

/* y (=, += or SwiGLU of) weight · x + bias for each of T tokens; x is normed first where norm is given. */
void product(float *y, const float *x, long T, const float *norm, float eps, const void *weight, enum kind kind,
             const void *steps, const float *bias, long outputs, long n, enum ending ending, int threads) {
    const long width = padded(n), lines = T == 1 ? 1 : (T + TOKENS - 1) / TOKENS * TOKENS;
    float *made = malloc(sizeof(float) * (T * outputs + lines * width)), *in = made + T * outputs;
    for (long t = 0; t < T; t++) {
        float *row = in + t * width;
        if (norm) rms_norm(row, x + t * n, norm, eps, n);
        else memcpy(row, x + t * n, n * sizeof *x);
        memset(row + n, 0, (width - n) * sizeof *x);
    }
    memset(in + T * width, 0, (lines - T) * width * sizeof *x);
    const long piece = kind == I4 ? 4 * LANES : PIECE, pieces = (outputs + piece - 1) / piece;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long i = 0; i < pieces; i++) {
            const long first = i * piece, last = first + piece < outputs ? first + piece : outputs;
            switch (kind) { /* so that each has a loop of its own */
            case F32: rows_of(made, in, T, weight, F32, NULL, first, last, outputs, n); break;
            case F16: rows_of(made, in, T, weight, F16, NULL, first, last, outputs, n); break;
            case BF16: rows_of(made, in, T, weight, BF16, NULL, first, last, outputs, n); break;
            case I8: rows_of(made, in, T, weight, I8, steps, first, last, outputs, n); break;
            case I4: block_of(made, in, T, weight, steps, i, outputs, n); break;
            }
        }
        const long kept = ending == SWIGLU ? outputs / 2 : outputs;
#pragma omp for schedule(static) collapse(2)
        for (long t = 0; t < T; t++)
            for (long i = 0; i < kept; i++) {
                const float *row = made + t * outputs;
                float value = row[i] + (bias ? bias[i] : 0), *to = y + t * kept + i;
                if (ending == SWIGLU) {
                    const float up = row[kept + i] + (bias ? bias[kept + i] : 0);
                    *to = value / (1 + exponential(-value)) * up;
                } else {
                    *to = ending == ADD ? *to + value : value;
                }
            }
    }
    free(made);
}

/* ---- positions ---- */

/* Norm, where weights are given, and turn, where cosines are, the heads of q and k in x [T, width]; cos and sin
 * [T, D], the first half of sin negated. */
void turn(float *x, long T, long width, long heads, long kv_heads, long D, const float *q_norm, const float *k_norm,
          float eps, const float *cos, const float *sin) {
    float old[D];
    for (long t = 0; t < T; t++)
        for (long h = 0; h < heads + kv_heads; h++) {
            float *head = x + t * width + h * D;
            if (q_norm) rms_norm(head, head, h < heads ? q_norm : k_norm, eps, D);
            if (!cos) continue;
            memcpy(old, head, sizeof old);
            for (long i = 0; i < D; i++)
                head[i] = old[i] * cos[t * D + i] + old[i < D / 2 ? i + D / 2 : i - D / 2] * sin[t * D + i];
        }
}

/* ---- attention ---- */

#define AT_ONCE 64 /* tokens whose scores are kept */

/* One K/V head and its group of queries over tokens first to last: for each query the unnormalized sum of values in
 * y [group, D + 2], then the largest score and the sum of exponentials (online softmax, arXiv 1805.02867). */
SPECIAL void look(float *y, const float *q, const char *k, const char *v, enum kind kind, long group, long first,
                        long last, long D, long k_stride, long v_stride) {
    const int size = size_of[kind];
    float scores[AT_ONCE], wide[AT_ONCE][padded(D)];
    for (long g = 0; g < group; g++) {
        memset(y + g * (D + 2), 0, D * sizeof *y);
        y[g * (D + 2) + D] = -3e38f, y[g * (D + 2) + D + 1] = 0;
    }
    for (long at = first; at < last; at += AT_ONCE) {
        const long n = last - at < AT_ONCE ? last - at : AT_ONCE;
        for (long g = 0; g < group; g++) {
            float *sums = y + g * (D + 2), *top = sums + D, *mass = top + 1, most = *top;
            if (g == 0)
                for (long s = 0; s < n; s++) widen(wide[s], k + (at + s) * k_stride * size, kind, D);
            for (long s = 0; s < n; s++) {
                scores[s] = dot(wide[s], F32, q + g * padded(D), padded(D));
                most = scores[s] > most ? scores[s] : most;
            }
            const float shrink = exponential(*top - most);
            float more = 0;
#pragma omp simd reduction(+ : more)
            for (long s = 0; s < n; s++) more += scores[s] = exponential(scores[s] - most);
            for (long i = 0; i < D; i++) sums[i] *= shrink;
            *mass = *mass * shrink + more, *top = most;
            for (long s = 0; s < n; s++) {
                const char *row = v + (at + s) * v_stride * size;
                long i = 0;
                for (; i + LANES <= D; i += LANES) {
                    vec old = load(sums + i, F32) + scores[s] * load(row + i * size, kind);
                    memcpy(sums + i, &old, sizeof old);
                }
                if (i < D) {
                    vec rest = scores[s] * load_rest(row + i * size, kind, D - i);
                    for (long j = i; j < D; j++) sums[j] += rest[j - i];
                }
            }
        }
    }
}

/* softmax(q kᵀ / √D) v for one query of kv_heads · group heads, over S tokens -> y [heads, D], and the logarithm of
 * the sum of exponentials in mass [heads]. Where new_k and new_v [kv_heads, D] are given, they are stored as the last
 * of the tokens first. Strides of k and v, from head to head and from token to token, in elements. The length is
 * split, so that few heads keep all threads busy (flash-decoding). */
void attend(float *y, float *mass, const float *q, const float *new_k, const float *new_v, void *k, void *v,
            enum kind kind, long kv_heads, long group, long S, long D, const long *strides, int threads) {
    for (long h = 0; new_k && h < kv_heads; h++) {
        narrow((char *)k + (h * strides[0] + (S - 1) * strides[1]) * size_of[kind], new_k + h * D, kind, D);
        narrow((char *)v + (h * strides[2] + (S - 1) * strides[3]) * size_of[kind], new_v + h * D, kind, D);
    }
    const long most = (8 * threads + kv_heads - 1) / kv_heads, whole = (S + 2 * AT_ONCE - 1) / (2 * AT_ONCE);
    const long splits = whole < most ? whole : most, each = (S + splits - 1) / splits;
    const long heads = kv_heads * group, width = D + 2;
    float *parts = malloc(sizeof(float) * heads * (splits * width + padded(D))), *scaled = parts + heads * splits * width;
    for (long h = 0; h < heads; h++)
        for (long i = 0; i < padded(D); i++) scaled[h * padded(D) + i] = i < D ? q[h * D + i] / root(D) : 0;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (long task = 0; task < kv_heads * splits; task++) {
        const long h = task / splits, first = task % splits * each, last = first + each < S ? first + each : S;
        const char *keys = (const char *)k + h * strides[0] * size_of[kind];
        const char *values = (const char *)v + h * strides[2] * size_of[kind];
        const float *queries = scaled + h * group * padded(D);
        float *to = parts + task * group * width;
        switch (kind) {
        case F32: look(to, queries, keys, values, F32, group, first, last, D, strides[1], strides[3]); break;
        case F16: look(to, queries, keys, values, F16, group, first, last, D, strides[1], strides[3]); break;
        default: look(to, queries, keys, values, BF16, group, first, last, D, strides[1], strides[3]); break;
        }
    }
    for (long h = 0; h < heads; h++) {
        const float *part = parts + (h / group * splits * group + h % group) * width;
        float top = -3e38f, total = 0;
        for (long s = 0; s < splits; s++) top = part[s * group * width + D] > top ? part[s * group * width + D] : top;
        memset(y + h * D, 0, D * sizeof *y);
        for (long s = 0; s < splits; s++, part += group * width) {
            const float weight = exponential(part[D] - top);
            total += weight * part[D + 1];
            for (long i = 0; i < D; i++) y[h * D + i] += weight * part[i];
        }
        for (long i = 0; i < D; i++) y[h * D + i] /= total;
        if (mass) mass[h] = top + __builtin_logf(total);
    }
    free(parts);
}

int lanes(void) { return LANES; }
