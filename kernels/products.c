/* Products of a few or many tokens with matrices of weights, and the turning of q and k. native.py says what the
 * arguments are. */

#include "vectors.h"

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

/* The weights of outputs first to last (not included) for n inputs, the first being `from`, as floats: input after input
 * for each output, outputs STRIDE apart. */
SPECIAL void widen_rows(float *to, const struct matrix *m, enum kind kind, long first, long last, long from, long n) {
    for (long row = first; row < last; row++)
        widen(to + (row - first) * STRIDE, (const char *)m->weight + (row * m->n + from) * size_of[kind], kind, n);
}

/* The same in 4 bits: output after output for each input, inputs ROOM apart. As torch's kernel for CPUs has it, a block of
 * 4 · LANES outputs lies together, input after input, and in a byte one output of the block's first half below and one
 * of the second above; steps [n / 32, outputs] hold a step below and a middle above, each a bfloat16. */
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

/* One token: nothing that is read serves twice. */
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

/* All threads take pieces of the outputs, for as many tiles of tokens as stay near; a piece of a SwiGLU is as many of its
 * gates as of what they let through, `apart` rows of sums from each other. */
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

int lanes(void) { return LANES; }
