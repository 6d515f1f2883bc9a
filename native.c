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
typedef float quad __attribute__((vector_size(16)));
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
SPECIAL quad sums(quad a, quad b, quad c, quad d) { return _mm_hadd_ps(_mm_hadd_ps(a, b), _mm_hadd_ps(c, d)); }
#elif defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
SPECIAL vec halves(const void *p) { return (vec)_mm256_cvtph_ps(_mm_loadu_si128(p)); }
SPECIAL ints shorts(const void *p) { return (ints)_mm256_cvtepu16_epi32(_mm_loadu_si128(p)); }
SPECIAL ints chars(const void *p) { return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(p)); }
SPECIAL ints bytes(const void *p) { return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(p)); }
SPECIAL vec floats(ints i) { return (vec)_mm256_cvtepi32_ps((__m256i)i); }
SPECIAL uint16_t half(float f) { return _cvtss_sh(f, 0); }
SPECIAL quad sums(quad a, quad b, quad c, quad d) { return _mm_hadd_ps(_mm_hadd_ps(a, b), _mm_hadd_ps(c, d)); }
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
SPECIAL float of(quad q) { return (q[0] + q[1]) + (q[2] + q[3]); }
SPECIAL quad sums(quad a, quad b, quad c, quad d) { return (quad){of(a), of(b), of(c), of(d)}; }
#endif

enum kind { F32, F16, BF16, I8, I4, U8, U4 }; /* of stored values: of weights, and of K and V */
enum ending { SET, ADD, SWIGLU };             /* what becomes of a product */

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

static float rms_scale(const float *x, float eps, long n) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (long i = 0; i < n; i++) squares += x[i] * x[i];
    return 1 / root(squares / n + eps);
}

static void rms_norm(float *y, const float *x, const float *weight, float eps, long n) {
    const float scale = rms_scale(x, eps, n);
    for (long i = 0; i < n; i++) y[i] = x[i] * scale * weight[i];
}

/* ---- products ---- */

/* Of few tokens the weights are read but once, and that is what takes the time. Of many, what is loaded has to serve
 * several multiplications (Goto and van de Geijn, Anatomy of high-performance matrix multiplication, 2008): TILES tiles
 * of tokens stay in the second cache of a core while the weights pass, those of a piece of the outputs stay there while
 * the tiles pass, and the sums of a tile of tokens and of some outputs stay in registers while their inputs pass. */
#define TILES 8
#define DEEP 768            /* most inputs at a time */
#define ROOM (9 * LANES)    /* rows of sums: two times one block of outputs in 4 bits, in whole tiles */
#define SUMS 12             /* vectors of sums in a tile: that many registers are left, and keep the multiplier busy */
#define STRIDE (DEEP + 16)  /* as DEEP rows would fall onto the same places of a cache */
#define NEAR 300000         /* bytes of tokens that stay in the second cache */

struct matrix {
    const void *weight;
    enum kind kind;
    const void *steps;
    const float *bias;
    long outputs, n;
};

/* sums [SUMS / V] rows of V vectors += as many rows of w, an input being `step` behind the one before, times the same n
 * inputs of V vectors of tokens. Meanwhile the weights that are needed next come nearer. */
SPECIAL void tile(float *sums, const int V, const float *w, long row, long step, const float *x, long n, int goes_on,
                  const char *next, long next_row, int size) {
    vec all[SUMS / V][V];
#pragma GCC unroll 12
    for (int r = 0; r < SUMS / V; r++)
        for (int v = 0; v < V; v++) all[r][v] = goes_on ? load(sums + (r * V + v) * LANES, F32) : (vec){0};
    for (long i = 0; i < n;) {
        if (next)
#pragma GCC unroll 12
            for (int r = 0; r < SUMS / V; r++) __builtin_prefetch(next + r * next_row + i * size, 0, 2);
        for (const long stop = i + 32 < n ? i + 32 : n; i < stop; i++) {
            const vec token[] = {load(x + i * V * LANES, F32), load(x + (i * V + V - 1) * LANES, F32)};
#pragma GCC unroll 12
            for (int r = 0; r < SUMS / V; r++)
#pragma GCC unroll 2
                for (int v = 0; v < V; v++) all[r][v] += w[r * row + i * step] * token[v];
        }
    }
    memcpy(sums, all, sizeof all);
}

static void tile_of(float *sums, int V, int block, const float *w, const float *x, long n, int goes_on, const char *next,
                    long next_row, int size) {
    if (block && V == 1) tile(sums, 1, w, 1, ROOM, x, n, goes_on, next, next_row, size);
    else if (block) tile(sums, 2, w, 1, ROOM, x, n, goes_on, next, next_row, size);
    else if (V == 1) tile(sums, 1, w, STRIDE, 1, x, n, goes_on, next, next_row, size);
    else tile(sums, 2, w, STRIDE, 1, x, n, goes_on, next, next_row, size);
}

/* Outputs first to last (not included), of inputs from to to, as floats: input after input for each output, STRIDE
 * apart; or those in 4 bits output after output for each input, ROOM apart. */
SPECIAL void widen_rows(float *to, const struct matrix *m, enum kind kind, long first, long last, long from, long n) {
    for (long row = first; row < last; row++)
        widen(to + (row - first) * STRIDE, (const char *)m->weight + (row * m->n + from) * size_of[kind], kind, n);
}

/* As torch's kernel for CPUs has them: a block of 4 · LANES outputs lies together, input after input, and in a byte one
 * output of the block's first half below and one of the second above; steps [n / 32, outputs] hold a step below and a
 * middle above, each a bfloat16. */
SPECIAL void widen_block(float *to, const struct matrix *m, long first, long from, long n) {
    const uint8_t *packed = (const uint8_t *)m->weight + (first * m->n / 2) + from * 2 * LANES;
    const uint32_t *steps = m->steps;
    ints both[4];
    for (long i = 0; i < n; i++, to += ROOM, packed += 2 * LANES) {
        if (i == 0 || (from + i) % 32 == 0) memcpy(both, steps + (from + i) / 32 * m->outputs + first, sizeof both);
        const ints pair[] = {bytes(packed), bytes(packed + LANES)};
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const ints number = j < 2 ? pair[j] & 15 : pair[j - 2] >> 4;
            const vec value = floats(number - 8) * (vec)(both[j] << 16) + (vec)(both[j] & (int32_t)0xffff0000);
            memcpy(to + j * LANES, &value, sizeof value);
        }
    }
}

static void unpack(float *to, const struct matrix *m, long first, long rows, long from, long n) {
    switch (m->kind) {
    case F32: widen_rows(to, m, F32, first, first + rows, from, n); break;
    case F16: widen_rows(to, m, F16, first, first + rows, from, n); break;
    case BF16: widen_rows(to, m, BF16, first, first + rows, from, n); break;
    case I8: widen_rows(to, m, I8, first, first + rows, from, n); break;
    default: widen_block(to, m, first, from, n);
    }
}

/* The products of one token with outputs first to last. */
SPECIAL void single(float *y, const float *x, const struct matrix *m, enum kind kind, long first, long last) {
    const char *w = (const char *)m->weight + first * m->n * size_of[kind];
    for (long row = first; row < last; row++, w += m->n * size_of[kind]) *y++ = dot(w, kind, x, m->n);
}

#define AHEAD 8
SPECIAL void single_block(float *y, const float *x, const struct matrix *m, long first) {
    const uint8_t *packed = (const uint8_t *)m->weight + first * m->n / 2;
    const uint32_t *steps = m->steps;
    const long groups = m->n / 32;
    vec total[4] = {0};
    for (long group = 0; group < groups; group++) {
        vec part[4] = {0};
        float all = 0;
        const long next = group + AHEAD < groups ? group + AHEAD : group + AHEAD - groups; /* far from here */
        const uint32_t *soon = steps + next * m->outputs + first + (next < group ? 4 * LANES : 0);
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
            memcpy(&both, steps + group * m->outputs + first + j * LANES, sizeof both);
            total[j] += (part[j] - 8 * all) * (vec)(both << 16) + all * (vec)(both & (int32_t)0xffff0000);
        }
    }
    memcpy(y, total, sizeof total);
}

/* x [T, n], normed where norm is given, in tiles of `width` tokens, [tiles, n, width]; beyond T they are 0. To be called
 * by all threads. */
static void lay(float *in, const float *x, long T, const float *norm, float eps, long n, long width, float *scales) {
#pragma omp for schedule(static)
    for (long t = 0; t < T; t++) scales[t] = norm ? rms_scale(x + t * n, eps, n) : 1;
#pragma omp for schedule(static) collapse(2)
    for (long first = 0; first < T; first += width)
        for (long from = 0; from < n; from += 64)
            for (long t = 0; t < width; t++)
                for (long i = from; i < n && i < from + 64; i++) {
                    const float value = first + t < T ? x[(first + t) * n + i] * scales[first + t] : 0;
                    in[(first * n) + i * width + t] = norm ? value * norm[i] : value;
                }
}

/* y [T, kept] (=, += or SwiGLU of) sums [rows, width] from output `first` on, SwiGLU's other factor `apart` rows on. */
static void finish(float *y, float *sums, long T, long width, const struct matrix *m, enum ending ending, long first,
                   long rows, long apart) {
    const long kept = ending == SWIGLU ? m->outputs / 2 : m->outputs;
    const float *steps = m->kind == I8 ? m->steps : NULL;
    for (long r = 0; r < rows; r++) {
        const long output = first + r;
        float *row = sums + r * width;
        const float step = steps ? steps[output] : 1, bias = m->bias ? m->bias[output] : 0;
        for (long t = 0; t < width; t++) row[t] = row[t] * step + bias;
        if (ending == SWIGLU) {
            const float *up = row + apart * width;
            const float its_step = steps ? steps[kept + output] : 1, its_bias = m->bias ? m->bias[kept + output] : 0;
            for (long t = 0; t < width; t++) row[t] = row[t] / (1 + exponential(-row[t])) * (up[t] * its_step + its_bias);
        }
    }
    for (long t = 0; t < T; t++)
        for (long r = 0; r < rows; r++) {
            float *to = y + t * kept + first + r;
            *to = ending == ADD ? *to + sums[r * width + t] : sums[r * width + t];
        }
}

static void one(float *y, const float *x, const float *norm, float eps, const struct matrix *m, enum ending ending,
                int threads) {
    float *in = malloc(padded(m->n) * sizeof *in);
    if (norm) rms_norm(in, x, norm, eps, m->n);
    else memcpy(in, x, m->n * sizeof *x);
    memset(in + m->n, 0, (padded(m->n) - m->n) * sizeof *x);
    const long halves = ending == SWIGLU ? 2 : 1, kept = m->outputs / halves, piece = m->kind == I4 ? 4 * LANES : 16;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long first = 0; first < kept; first += piece) {
        float sums[8 * LANES];
        const long rows = kept - first < piece ? kept - first : piece;
        for (long h = 0; h < halves; h++) {
            const long row = first + h * kept;
            switch (m->kind) { /* so that each has a loop of its own */
            case F32: single(sums + h * rows, in, m, F32, row, row + rows); break;
            case F16: single(sums + h * rows, in, m, F16, row, row + rows); break;
            case BF16: single(sums + h * rows, in, m, BF16, row, row + rows); break;
            case I8: single(sums + h * rows, in, m, I8, row, row + rows); break;
            default: single_block(sums + h * rows, in, m, row);
            }
        }
        finish(y, sums, 1, 1, m, ending, first, rows, rows);
    }
    free(in);
}

static _Thread_local float wide[ROOM * STRIDE], summed[TILES * ROOM * 2 * LANES];

static void many(float *y, const float *x, long T, const float *norm, float eps, const struct matrix *m,
                 enum ending ending, int threads) {
    const int V = T <= LANES ? 1 : 2, block = m->kind == I4, size = block ? 0 : size_of[m->kind];
    const long width = V * LANES, n = m->n, tiles = (T + width - 1) / width, apart = ROOM / 2;
    const long halves = ending == SWIGLU ? 2 : 1, kept = m->outputs / halves;
    const long piece = block ? 4 * LANES : 6 * LANES / halves;
    const long depth = (n + DEEP - 1) / DEEP, deep = ((n + depth - 1) / depth + 31) / 32 * 32;
    const long near = NEAR / (n * width * sizeof *x), each = near < 1 ? 1 : near > TILES ? TILES : near;
    float *in = aligned_alloc(64, (tiles * width * n + T + 15) / 16 * 64), *scales = in + tiles * width * n;
#pragma omp parallel num_threads(threads)
    {
        lay(in, x, T, norm, eps, n, width, scales);
        float *w = wide, *s = summed;
#pragma omp for schedule(static) collapse(2)
        for (long begin = 0; begin < tiles; begin += each)
            for (long first = 0; first < kept; first += piece) {
                const long end = begin + each < tiles ? begin + each : tiles;
                const long rows = kept - first < piece ? kept - first : piece;
                for (long from = 0; from < n; from += deep) {
                    const long count = n - from < deep ? n - from : deep;
                    const long next = from + deep < n ? from + deep : piece * n; /* what is multiplied after this */
                    for (long h = 0; h < halves; h++)
                        unpack(w + h * apart * (block ? 1 : STRIDE), m, first + h * kept, rows, from, count);
                    for (long t = begin; t < end; t++)
                        for (long h = 0; h < halves; h++)
                            for (long r = 0; r < rows; r += SUMS / V) {
                                const char *at = (const char *)m->weight + ((first + h * kept + r) * n + next) * size;
                                tile_of(s + ((t - begin) * ROOM + h * apart + r) * width, V, block,
                                        w + (h * apart + r) * (block ? 1 : STRIDE), in + (t * n + from) * width, count,
                                        from > 0, t == begin && !block ? at : NULL, n * size, size);
                            }
                }
                for (long t = begin; t < end; t++) {
                    const long tokens = T - t * width < width ? T - t * width : width;
                    finish(y + t * width * kept, s + (t - begin) * ROOM * width, tokens, width, m, ending, first, rows,
                           apart);
                }
            }
    }
    free(in);
}

/* y (=, += or SwiGLU of) weight · x + bias for each of T tokens; x is normed first where norm is given. */
void product(float *y, const float *x, long T, const float *norm, float eps, const void *weight, enum kind kind,
             const void *steps, const float *bias, long outputs, long n, enum ending ending, int threads) {
    const struct matrix m = {weight, kind, steps, bias, outputs, n};
    if (T == 1) one(y, x, norm, eps, &m, ending, threads);
    else many(y, x, T, norm, eps, &m, ending, threads);
}

/* ---- positions ---- */

/* Norm, where weights are given, and turn, where cosines are, the heads of q and k in x [T, width]; cos and sin
 * [T, D], the first half of sin negated. */
void turn(float *x, long T, long width, long heads, long kv_heads, long D, const float *q_norm, const float *k_norm,
          float eps, const float *cos, const float *sin, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (T > 1)
    for (long t = 0; t < T; t++)
        for (long h = 0; h < heads + kv_heads; h++) {
            float old[D];
            float *head = x + t * width + h * D;
            if (q_norm) rms_norm(head, head, h < heads ? q_norm : k_norm, eps, D);
            if (!cos) continue;
            memcpy(old, head, sizeof old);
            for (long i = 0; i < D; i++)
                head[i] = old[i] * cos[t * D + i] + old[i < D / 2 ? i + D / 2 : i - D / 2] * sin[t * D + i];
        }
}

/* ---- attention, of heads whose size D is a multiple of LANES, or in 4 bits of twice that ---- */

#define GROUP 32  /* tokens that are made whole together, and that share the scales of their keys in 8 or 4 bits */
#define QUERIES 3 /* that share what is read; with four tokens, or vectors of a value, each, they fill the registers */

/* Where K and V of a layer lie: distances from head to head and from token to token, in elements, or in bytes where they
 * are packed. Then there are scales too (quantized.py), for each channel of a group of keys, and for each value: steps,
 * and the lowest numbers as far behind them as `low` says. */
struct memory {
    char *k, *v;
    long k_head, k_token, v_head, v_token, kind;
    const char *k_scales, *v_scales;
    long k_scales_head, k_low, v_scales_head, v_low, scales;
};

struct stretch { long memory, first, last; }; /* of tokens that lie behind each other, the last one not included */

/* Rows of n values, `apart` bytes, as floats. */
static void widen_all(float *to, const char *from, enum kind kind, long rows, long n, long apart) {
    for (; rows > 0; rows--, from += apart, to += n)
        switch (kind) {
        case F32: widen(to, from, F32, n); break;
        case F16: widen(to, from, F16, n); break;
        case BF16: widen(to, from, BF16, n); break;
        case U8: widen(to, from, U8, n); break;
        default: /* in a byte one number of the first half, and one of the second half above it */
            for (long i = 0; i < n / 2; i += LANES) {
                const ints both = bytes(from + i);
                const vec low = floats(both & 15), high = floats(both >> 4);
                memcpy(to + i, &low, sizeof low);
                memcpy(to + n / 2 + i, &high, sizeof high);
            }
        }
}

static void keys_of(float *to, const struct memory *m, long h, long first, long n, long D) {
    const long size = size_of[m->kind], scale = size_of[m->scales];
    widen_all(to, m->k + (h * m->k_head + first * m->k_token) * size, m->kind, n, D, m->k_token * size);
    if (m->kind < U8) return;
    float step[D], low[D];
    const char *scales = m->k_scales + (h * m->k_scales_head + first / GROUP * D) * scale;
    widen_all(step, scales, m->scales, 1, D, 0);
    widen_all(low, scales + m->k_low * scale, m->scales, 1, D, 0);
    for (long s = 0; s < n; s++, to += D)
        for (long i = 0; i < D; i++) to[i] = to[i] * step[i] + low[i];
}

static void values_of(float *to, const struct memory *m, long h, long first, long n, long D) {
    const long size = size_of[m->kind], scale = size_of[m->scales];
    widen_all(to, m->v + (h * m->v_head + first * m->v_token) * size, m->kind, n, D, m->v_token * size);
    if (m->kind < U8) return;
    float step[GROUP], low[GROUP];
    const char *scales = m->v_scales + (h * m->v_scales_head + first) * scale;
    widen_all(step, scales, m->scales, 1, n, 0);
    widen_all(low, scales + m->v_low * scale, m->scales, 1, n, 0);
    for (long s = 0; s < n; s++, to += D)
        for (long i = 0; i < D; i++) to[i] = to[i] * step[s] + low[s];
}

/* Have those tokens come nearer while others are looked at. */
static void call(const struct memory *m, long h, long first, long n, long D) {
    const long size = size_of[m->kind], bytes = m->kind == U4 ? D / 2 : D * size;
    const char *k = m->k + (h * m->k_head + first * m->k_token) * size;
    const char *v = m->v + (h * m->v_head + first * m->v_token) * size;
    for (; n > 0; n--, k += m->k_token * size, v += m->v_token * size)
        for (long at = 0; at < bytes; at += 64) __builtin_prefetch(k + at), __builtin_prefetch(v + at);
}

/* Scores become weights, and what is in y [G, D + 2] beside them is shrunk to fit: the unnormalized sum of values, then
 * the largest score and the sum of exponentials (online softmax, arXiv 1805.02867). */
static void soften(float *y, float *scores, long G, long n, long D) {
    for (long g = 0; g < G; g++, y += D + 2, scores += GROUP) {
        float most = y[D], more = 0;
        for (long s = 0; s < n; s++) most = scores[s] > most ? scores[s] : most;
        const float shrink = exponential(y[D] - most);
#pragma omp simd reduction(+ : more)
        for (long s = 0; s < n; s++) more += scores[s] = exponential(scores[s] - most);
        for (long i = 0; i < D; i++) y[i] *= shrink;
        y[D] = most, y[D + 1] = y[D + 1] * shrink + more;
    }
}

/* y [G, D + 2] += the first W vectors from dimension i on of n values, weighed by weights [G, GROUP]. */
SPECIAL void weigh(float *y, const float *weights, const float *v, const int G, const int W, long n, long i, long D) {
    vec sums[QUERIES][W];
    for (int g = 0; g < G; g++) memcpy(sums[g], y + g * (D + 2) + i, sizeof sums[g]);
    for (long s = 0; s < n; s++)
#pragma GCC unroll 4
        for (int j = 0; j < W; j++) {
            const vec value = load(v + s * D + i + j * LANES, F32);
#pragma GCC unroll 3
            for (int g = 0; g < G; g++) sums[g][j] += weights[g * GROUP + s] * value;
        }
    for (int g = 0; g < G; g++) memcpy(y + g * (D + 2) + i, sums[g], sizeof sums[g]);
}

/* G queries of one K/V head over n tokens more, k [n, D] and v [n, D]. */
SPECIAL void look(float *y, const float *q, const float *k, const float *v, const int G, long n, long D) {
    float scores[QUERIES * GROUP];
    for (long s = 0; s < n; s += 4) {
        vec sums[QUERIES][4] = {0};
        for (long i = 0; i < D; i += LANES)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                const vec key = load(k + (s + j < n ? s + j : n - 1) * D + i, F32);
#pragma GCC unroll 3
                for (int g = 0; g < G; g++) sums[g][j] += load(q + g * D + i, F32) * key;
            }
        for (int g = 0; g < G; g++) {
            const quad four = sums_of(sums[g]);
            memcpy(scores + g * GROUP + s, &four, sizeof four);
        }
    }
    soften(y, scores, G, n, D);
    long i = 0;
    for (; i + 4 * LANES <= D; i += 4 * LANES) weigh(y, scores, v, G, 4, n, i, D);
    for (; i < D; i += LANES) weigh(y, scores, v, G, 1, n, i, D);
}

/* A group of queries over one K/V head's tokens first to last, into y [group, D + 2] as `soften` has it. */
static void look_at(float *y, const float *q, const struct memory *m, long h, long first, long last, long group,
                    long D) {
    float k[GROUP * D], v[GROUP * D];
    for (long g = 0; g < group; g++) {
        memset(y + g * (D + 2), 0, D * sizeof *y);
        y[g * (D + 2) + D] = -3e38f, y[g * (D + 2) + D + 1] = 0;
    }
    for (long n; first < last; first += n) {
        const long rest = GROUP - first % GROUP;
        n = last - first < rest ? last - first : rest;
        const long next = first + n;
        keys_of(k, m, h, first, n, D);
        values_of(v, m, h, first, n, D);
        long g = 0;
        for (; g + QUERIES <= group; g += QUERIES) look(y + g * (D + 2), q + g * D, k, v, QUERIES, n, D);
        for (; g < group; g++) look(y + g * (D + 2), q + g * D, k, v, 1, n, D);
    }
}

static void keep(const struct memory *m, const float *k, const float *v, long h, long slot, long D) {
    narrow(m->k + (h * m->k_head + slot * m->k_token) * size_of[m->kind], k, m->kind, D);
    narrow(m->v + (h * m->v_head + slot * m->v_token) * size_of[m->kind], v, m->kind, D);
}

/* softmax(q kᵀ / √D) v for each of some queries of kv_heads · group heads -> y [queries, heads, D], and the logarithm of
 * the sum of exponentials in mass [queries, heads]. Query i looks at the stretches from ends[i - 1] to ends[i].
 * Where new_k and new_v are given, they are stored first, each query's in the last slot that it looks at. Rows, of q,
 * new_k and new_v, in elements. Long stretches are split, so that few heads keep all threads busy (flash-decoding). */
void attend(float *y, float *mass, const float *q, const float *new_k, const float *new_v, const long *rows,
            const struct memory *memories, long queries, const long *ends, const struct stretch *stretches,
            long kv_heads, long group, long D, int threads) {
    const long heads = kv_heads * group, width = D + 2, last_end = ends[queries - 1];
    long total = 0, pieces = 0;
    for (long i = 0; i < last_end; i++) total += stretches[i].last - stretches[i].first;
    const long splits = (8 * threads + kv_heads - 1) / kv_heads, groups = (total / splits + GROUP - 1) / GROUP;
    const long each = (groups < 4 ? 4 : groups) * GROUP;
    for (long i = 0; i < last_end; i++) pieces += (stretches[i].last - stretches[i].first + each - 1) / each;

    struct piece { long query; struct stretch of; } *piece = malloc(pieces * sizeof *piece), *next = piece;
    float *parts = malloc(sizeof(float) * heads * (pieces * width + queries * D));
    float *scaled = parts + heads * pieces * width;
    for (long i = 0, at = 0; i < queries; i++) {
        const struct stretch newest = stretches[ends[i] - 1];
        for (long h = 0; new_k && h < kv_heads; h++)
            keep(memories + newest.memory, new_k + i * rows[1] + h * D, new_v + i * rows[2] + h * D, h, newest.last - 1,
                 D);
        for (long h = 0; h < heads; h++)
            for (long j = 0; j < D; j++) scaled[(i * heads + h) * D + j] = q[i * rows[0] + h * D + j] / root(D);
        for (; at < ends[i]; at++) {
            struct stretch left = stretches[at];
            for (; left.first < left.last; left.first += each) {
                *next = (struct piece){i, left};
                if (left.last - left.first > each) next->of.last = left.first + each;
                next++;
            }
        }
    }
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (long task = 0; task < pieces * kv_heads; task++) {
        const struct piece p = piece[task / kv_heads];
        const long h = task % kv_heads;
        look_at(parts + task * group * width, scaled + (p.query * heads + h * group) * D, memories + p.of.memory, h,
                p.of.first, p.of.last, group, D);
    }
    for (long i = 0, from = 0, to = 0; i < queries; i++, from = to) {
        while (to < pieces && piece[to].query == i) to++;
        for (long h = 0; h < heads; h++, y += D) {
            const float *first = parts + (from * heads + h) * width, *end = parts + (to * heads + h) * width;
            float top = -3e38f, all = 0;
            for (const float *part = first; part < end; part += heads * width) top = part[D] > top ? part[D] : top;
            memset(y, 0, D * sizeof *y);
            for (const float *part = first; part < end; part += heads * width) {
                const float weight = exponential(part[D] - top);
                all += weight * part[D + 1];
                for (long j = 0; j < D; j++) y[j] += weight * part[j];
            }
            for (long j = 0; j < D; j++) y[j] /= all;
            if (mass) *mass++ = top + __builtin_logf(all);
        }
    }
    free(parts);
    free(piece);
}

int lanes(void) { return LANES; }
