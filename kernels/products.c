/* Products of tokens with matrices of weights, and the turning of q and k. */

#include "vectors.h"

/* Some of these after each other. To end a region and begin another takes as long as a small product. */
void perform(const struct job *const *jobs, long count, int threads) {
#pragma omp parallel num_threads(threads)
    for (long i = 0; i < count; i++) jobs[i]->run(jobs[i]);
}

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
    if (i < n) b += load_rest(from, kind, n - i) * load_rest(x + i, F32, n - i);
    return sum((a + b) + (c + d));
}

/* Of few tokens, to read the weights is what takes the time. Of many, what is loaded has to serve
 * several multiplications (Goto and van de Geijn, Anatomy of high-performance matrix multiplication, 2008): TILES tiles
 * of tokens stay in the second cache of a core while the weights pass, those of a piece of the outputs stay there while
 * the tiles pass, and the sums of a tile of tokens and of some outputs stay in registers while their inputs pass. */
#define FEW 8               /* tokens for which that does not pay yet */
#define TILES 8
#define DEEP 768            /* most inputs at a time */
#define ROOM (9 * LANES)    /* rows of sums: two times one block of outputs in 4 bits, in whole tiles */
#define SUMS 12             /* vectors of sums in a tile: that many registers are left, and keep the multiplier busy */
#define STRIDE (DEEP + 16)  /* as DEEP rows would fall onto the same places of a cache */
#define NEAR 300000         /* bytes of tokens that stay in the second cache */

struct matrix {
    const void *weight;
    long kind;
    const void *steps;
    const float *bias;
    long outputs, n;
};

/* y [T, outputs] (=, += or SwiGLU of) weight · x + bias for x [T, n], which is normed first where norm is given. */
struct product {
    struct job job;
    struct matrix matrix;
    const float *norm;
    float eps;
    float *y;
    const float *x;
    long T, ending;
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
#pragma GCC unroll 4
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

/* sums [rows, width] of the outputs from `first` on, in whole steps until now, are made products. */
static void scale(float *sums, long width, const struct matrix *m, long first, long rows) {
    const float *steps = m->kind == I8 ? m->steps : NULL;
    for (long r = 0; (steps || m->bias) && r < rows; r++) {
        const float step = steps ? steps[first + r] : 1, bias = m->bias ? m->bias[first + r] : 0;
        for (long t = 0; t < width; t++) sums[r * width + t] = sums[r * width + t] * step + bias;
    }
}

/* y [T, kept] (=, += or SwiGLU of) sums [rows, width] from output `first` on, SwiGLU's other factor `apart` rows on. */
static void finish(float *y, float *sums, long T, long width, const struct matrix *m, enum ending ending, long first,
                   long rows, long apart) {
    const long kept = ending == SWIGLU ? m->outputs / 2 : m->outputs;
    scale(sums, width, m, first, rows);
    if (ending == SWIGLU) {
        float *up = sums + apart * width;
        scale(up, width, m, kept + first, rows);
        for (long i = 0; i < rows * width; i++) sums[i] = sums[i] / (1 + exponential(-sums[i])) * up[i];
    }
    for (long t = 0; t < T; t++)
        for (long r = 0; r < rows; r++) {
            float *to = y + t * kept + first + r;
            *to = ending == ADD ? *to + sums[r * width + t] : sums[r * width + t];
        }
}

/* One token: nothing that is read serves twice. */
static void one(const struct product *p) {
    const struct matrix *m = &p->matrix;
    float *normed = p->norm ? malloc(m->n * sizeof *normed) : NULL;
    if (normed) rms_norm(normed, p->x, p->norm, p->eps, m->n);
    const float *x = normed ? normed : p->x;
    const long halves = p->ending == SWIGLU ? 2 : 1, kept = m->outputs / halves, piece = m->kind == I4 ? 4 * LANES : 16;
#pragma omp for schedule(static)
    for (long first = 0; first < kept; first += piece) {
        float sums[8 * LANES];
        const long rows = kept - first < piece ? kept - first : piece;
        for (long h = 0; h < halves; h++) {
            const long row = first + h * kept;
            switch (m->kind) { /* so that each has a loop of its own */
            case F32: single(sums + h * rows, x, m, F32, row, row + rows); break;
            case F16: single(sums + h * rows, x, m, F16, row, row + rows); break;
            case BF16: single(sums + h * rows, x, m, BF16, row, row + rows); break;
            case I8: single(sums + h * rows, x, m, I8, row, row + rows); break;
            default: single_block(sums + h * rows, x, m, row);
            }
        }
        finish(p->y, sums, 1, 1, m, p->ending, first, rows, rows);
    }
    free(normed);
}

/* Two outputs of the weights `w`, so far from each other, for up to four tokens, x [tokens, n], into the rows of sums. */
SPECIAL void corner(float *sums[2], const char *w, long apart, enum kind kind, const float *x, long tokens, long n) {
    vec all[2][4] = {0};
    const float *token[4];
    for (int t = 0; t < 4; t++) token[t] = x + (t < tokens ? t : tokens - 1) * n;
    long i = 0;
    for (; i + LANES <= n; i += LANES, w += LANES * size_of[kind]) {
        vec values[4];
#pragma GCC unroll 4
        for (int t = 0; t < 4; t++) values[t] = load(token[t] + i, F32);
#pragma GCC unroll 2
        for (int r = 0; r < 2; r++) {
            const vec weight = load(w + r * apart, kind);
            __builtin_prefetch(w + (r + 4) * apart, 0, 2); /* so that reading does not stop where a row ends */
#pragma GCC unroll 4
            for (int t = 0; t < 4; t++) all[r][t] += weight * values[t];
        }
    }
#pragma GCC unroll 2
    for (int r = 0; i < n && r < 2; r++)
#pragma GCC unroll 4
        for (int t = 0; t < 4; t++) all[r][t] += load_rest(w + r * apart, kind, n - i) * load_rest(token[t] + i, F32, n - i);
#pragma GCC unroll 2
    for (int r = 0; r < 2; r++) {
        const quad four = sums_of(all[r]);
        memcpy(sums[r], &four, sizeof four);
    }
}

SPECIAL void corners(float *sums, long width, const float *x, long T, const struct matrix *m, enum kind kind, long first,
                     long rows) {
    const long row = m->n * size_of[kind];
    for (long r = 0; r < rows; r += 2)
        for (long t = 0; t < T; t += 4) {
            const long other = r + 1 < rows; /* or the only one twice */
            float *to = sums + r * width + t;
            corner((float *[]){to, to + other * width}, (const char *)m->weight + (first + r) * row, other * row, kind,
                   x + t * m->n, T - t, m->n);
        }
}

/* A few tokens: a weight that is read serves them all, and what is read of four tokens serves two outputs. */
static void few(const struct product *p) {
    const struct matrix *m = &p->matrix;
    const long T = p->T, n = m->n, width = (T + 3) / 4 * 4, piece = 16;
    const long halves = p->ending == SWIGLU ? 2 : 1, kept = m->outputs / halves;
    float *normed;
#pragma omp single copyprivate(normed)
    normed = p->norm ? malloc(T * n * sizeof *normed) : NULL;
    if (normed) {
#pragma omp for schedule(static)
        for (long t = 0; t < T; t++) rms_norm(normed + t * n, p->x + t * n, p->norm, p->eps, n);
    }
    const float *x = normed ? normed : p->x;
#pragma omp for schedule(static)
    for (long first = 0; first < kept; first += piece) {
        float sums[2 * piece * width];
        const long rows = kept - first < piece ? kept - first : piece;
        for (long h = 0; h < halves; h++) {
            float *to = sums + h * rows * width;
            const long row = first + h * kept;
            switch (m->kind) {
            case F32: corners(to, width, x, T, m, F32, row, rows); break;
            case F16: corners(to, width, x, T, m, F16, row, rows); break;
            case BF16: corners(to, width, x, T, m, BF16, row, rows); break;
            default: corners(to, width, x, T, m, I8, row, rows);
            }
        }
        finish(p->y, sums, T, width, m, p->ending, first, rows, rows);
    }
#pragma omp master
    free(normed);
}

static _Thread_local float wide[ROOM * STRIDE], summed[TILES * ROOM * 2 * LANES];

/* All threads take pieces of the outputs, for as many tiles of tokens as stay near; a piece of a SwiGLU is as many of its
 * gates as of what they let through, `apart` rows of sums from each other. */
static void many(const struct product *p) {
    const struct matrix *m = &p->matrix;
    const enum ending ending = p->ending;
    const long T = p->T;
    const int V = T <= LANES ? 1 : 2, block = m->kind == I4, size = block ? 0 : size_of[m->kind];
    const long width = V * LANES, n = m->n, tiles = (T + width - 1) / width, apart = ROOM / 2;
    const long halves = ending == SWIGLU ? 2 : 1, kept = m->outputs / halves;
    const long piece = block ? 4 * LANES : 6 * LANES / halves;
    const long depth = (n + DEEP - 1) / DEEP, deep = ((n + depth - 1) / depth + 31) / 32 * 32;
    float *in, *w = wide, *s = summed;
    const long near = NEAR / (n * width * sizeof *in), each = near < 1 ? 1 : near > TILES ? TILES : near;
#pragma omp single copyprivate(in)
    in = aligned_alloc(64, (tiles * width * n + T + 15) / 16 * 64);
    lay(in, p->x, T, p->norm, p->eps, n, width, in + tiles * width * n);
#pragma omp for schedule(dynamic) collapse(2)
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
                finish(p->y + t * width * kept, s + (t - begin) * ROOM * width, tokens, width, m, ending, first, rows,
                       apart);
            }
        }
#pragma omp master
    free(in);
}

void product(const struct job *job) {
    const struct product *p = (const struct product *)job;
    if (p->T == 1) one(p);
    else if (p->T <= FEW && p->matrix.kind != I4) few(p);
    else many(p);
}

/* ---- positions ---- */

/* Norm, where weights are given, and turn, where cosines are, the heads of q and k in x [T, width]; cos and sin
 * [T, D], the first half of sin negated. */
struct turn {
    struct job job;
    float *x;
    long T, width, heads, kv_heads, D;
    const float *q_norm, *k_norm;
    float eps;
    const float *cos, *sin;
};

void turn(const struct job *job) {
    const struct turn *a = (const struct turn *)job;
    const long D = a->D, count = a->heads + a->kv_heads;
#pragma omp for schedule(static)
    for (long i = 0; i < a->T * count; i++) {
        const long t = i / count, h = i % count;
        float old[D], *head = a->x + t * a->width + h * D;
        if (a->q_norm) rms_norm(head, head, h < a->heads ? a->q_norm : a->k_norm, a->eps, D);
        if (!a->cos) continue;
        memcpy(old, head, sizeof old);
        const float *cos = a->cos + t * D, *sin = a->sin + t * D;
        for (long j = 0; j < D; j++) head[j] = old[j] * cos[j] + old[j < D / 2 ? j + D / 2 : j - D / 2] * sin[j];
    }
}

int lanes(void) { return LANES; }
