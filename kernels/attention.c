/* The attention of tokens over what their sequences hold, of heads whose size D is a multiple of LANES, or in 4 bits of
 * twice that. */

#include "vectors.h"

/* The inverse of `widen`: floats as they are stored, rounded to the nearest. */
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

#define LEAST -3e38f /* a score that is none */
#define GROUP 32  /* tokens that are made whole together, and that share the scales of their keys in 8 or 4 bits */
#define QUERIES 6 /* at most, that share what is read */
#define ACROSS 12  /* queries, for which it pays to lay keys across, so that vectors of scores need not be summed up */
#define NEAR 6144 /* values of the queries that stay in the first cache while keys and values pass */

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

/* Rows of n values, so many bytes from each other. */
struct rows { const char *at; long apart; };

static struct rows keys_at(const struct memory *m, long h, long slot) {
    const long size = size_of[m->kind];
    return (struct rows){m->k + (h * m->k_head + slot * m->k_token) * size, m->k_token * size};
}

static struct rows values_at(const struct memory *m, long h, long slot) {
    const long size = size_of[m->kind];
    return (struct rows){m->v + (h * m->v_head + slot * m->v_token) * size, m->v_token * size};
}

/* As floats, densely. */
static void widen_all(float *to, struct rows of, enum kind kind, long rows, long n) {
    const char *from = of.at;
    for (; rows > 0; rows--, from += of.apart, to += n)
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

/* The tokens that a query sees of those before it, by their place in its sequence, the last one not included. */
struct sight { long first, last; };

/* Scores of GROUP tokens, of which those from `first` to `last` are seen, become weights, and what is in y [D + 2] beside
 * them is shrunk to fit: the unnormalized sum of values, then the largest score and the sum of exponentials (online softmax,
 * arXiv 1805.02867). */
static void soften(float *y, float *scores, int first, int last, long D) {
    if (first >= last) {
        memset(scores, 0, GROUP * sizeof *scores);
        return;
    }
    float most = y[D], more = 0;
    for (int s = 0; s < GROUP; s++) scores[s] = s < first || s >= last ? LEAST : scores[s];
#pragma omp simd reduction(max : most)
    for (int s = 0; s < GROUP; s++) most = scores[s] > most ? scores[s] : most;
    const float shrink = exponential(y[D] - most);
#pragma omp simd reduction(+ : more)
    for (int s = 0; s < GROUP; s++) more += scores[s] = s < first || s >= last ? 0 : exponential(scores[s] - most);
    if (shrink < 1)
        for (long i = 0; i < D; i++) y[i] *= shrink;
    y[D] = most, y[D + 1] = y[D + 1] * shrink + more;
}

/* Up to GROUP tokens of a K/V head, the first of them being the token `at`: k and v [n, D]; and the tokens of which k and v
 * are read next, `coming` rows of so many bytes. Packed numbers count in steps from a lowest one, here those of the values;
 * those of the keys' channels are in the queries (step_queries). */
struct group {
    struct rows k, v, next[2];
    long at, n, coming, bytes, packed;
    float step[GROUP], low[GROUP];
};

/* Scores [G, GROUP] of G queries. Memory takes long to begin: while four keys are multiplied, four of the next group come
 * nearer, and their values. */
SPECIAL void dots(float *scores, const float *q, const struct group *of, enum kind kind, const int G, long D) {
    const struct rows k = of->k, *next = of->next;
    for (long s = 0; s < of->n; s += 4) {
        vec sums[3][4] = {0};
        const char *key[4];
        for (int j = 0; j < 4; j++) {
            key[j] = k.at + (s + j < of->n ? s + j : of->n - 1) * k.apart;
            for (long i = 0; s + j < of->coming && i < of->bytes; i += 64) {
                __builtin_prefetch(next[0].at + (s + j) * next[0].apart + i);
                __builtin_prefetch(next[1].at + (s + j) * next[1].apart + i);
            }
        }
        for (long i = 0; i < D; i += LANES)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                const vec values = load(key[j] + i * size_of[kind], kind);
#pragma GCC unroll 3
                for (int g = 0; g < G; g++) sums[g][j] += load(q + g * D + i, F32) * values;
            }
#pragma GCC unroll 3
        for (int g = 0; g < G; g++) {
            const quad four = sums_of(sums[g]);
            memcpy(scores + g * GROUP + s, &four, sizeof four);
        }
    }
}

/* W vectors of each of G rows of y += the sum of n rows of x, each times a weight; each row so far from the next. */
SPECIAL void mix(float *y, long y_row, const float *weights, long weights_row, struct rows x, enum kind kind, const int G,
                 const int W, long n) {
    vec sums[QUERIES][4];
#pragma GCC unroll 6
    for (int g = 0; g < G; g++)
#pragma GCC unroll 4
        for (int j = 0; j < W; j++) sums[g][j] = load(y + g * y_row + j * LANES, F32);
    for (long s = 0; s < n; s++) {
        vec values[4]; /* these stay in registers, or the weights, whichever are fewer */
#pragma GCC unroll 4
        for (int j = 0; W < G && j < W; j++) values[j] = load(x.at + s * x.apart + j * LANES * size_of[kind], kind);
#pragma GCC unroll 6
        for (int g = 0; W < G && g < G; g++)
#pragma GCC unroll 4
            for (int j = 0; j < W; j++) sums[g][j] += weights[g * weights_row + s] * values[j];
#pragma GCC unroll 4
        for (int j = 0; W >= G && j < W; j++) {
            values[0] = load(x.at + s * x.apart + j * LANES * size_of[kind], kind);
#pragma GCC unroll 6
            for (int g = 0; g < G; g++) sums[g][j] += weights[g * weights_row + s] * values[0];
        }
    }
#pragma GCC unroll 6
    for (int g = 0; g < G; g++)
#pragma GCC unroll 4
        for (int j = 0; j < W; j++) memcpy(y + g * y_row + j * LANES, &sums[g][j], sizeof(vec));
}

/* One vector of each row of v, where `mix_rows` has fewer left than it takes at a time: rare, so it is compiled once. */
static __attribute__((noinline)) void mix_rest(float *y, const float *scores, struct rows v, enum kind kind, int G, long n,
                                               long D) {
    float column[GROUP * LANES];
    widen_all(column, v, kind, n, LANES);
    for (; G > 0; G--, y += D + 2, scores += GROUP)
        mix(y, 0, scores, 0, (struct rows){(char *)column, LANES * sizeof *column}, F32, 1, 1, n);
}

/* G rows of y += their weights' sums of whole rows of v, as many vectors at a time as fill the registers with sums. */
SPECIAL void mix_rows(float *y, const float *scores, const struct group *of, enum kind kind, const int G, long D) {
    const int W = G > 3 ? 2 : 4;
    struct rows v = of->v;
    long i = 0;
    for (; i + W * LANES <= D; i += W * LANES, v.at += W * LANES * size_of[kind])
        mix(y + i, D + 2, scores, GROUP, v, kind, G, W, of->n);
    for (; i < D; i += LANES, v.at += LANES * size_of[kind]) mix_rest(y + i, scores, v, kind, G, of->n, D);
}

/* Weights [GROUP] of packed values become those of their numbers; what all numbers count from is added to y [D]. */
static void unstep(float *y, float *weights, const struct group *of, long D) {
    float low = 0;
#pragma omp simd reduction(+ : low)
    for (long s = 0; s < of->n; s++) low += weights[s] * of->low[s];
    for (long s = 0; s < of->n; s++) weights[s] *= of->step[s];
    for (long i = 0; i < D; i++) y[i] += low;
}

/* G queries over a group, into y [G, D + 2] as `soften` has it: 1 or 3, or QUERIES if its keys lie across, [D, GROUP], and
 * all are floats. Scores with packed keys lack `lows` (step_queries). */
static void look(float *y, const float *q, const float *lows, const struct sight *sees, const struct group *of,
                 enum kind kind, int G, long D) {
    float scores[QUERIES * GROUP];
#define DOTS(KIND) G == 3 ? dots(scores, q, of, KIND, 3, D) : dots(scores, q, of, KIND, 1, D)
#define MIX(KIND) G == 3 ? mix_rows(y, scores, of, KIND, 3, D) : mix_rows(y, scores, of, KIND, 1, D)
    if (G == QUERIES) {
        memset(scores, 0, sizeof scores);
        for (long s = 0; s < GROUP; s += 2 * LANES)
            mix(scores + s, GROUP, q, D, (struct rows){of->k.at + s * sizeof *scores, of->k.apart}, F32, QUERIES, 2, D);
    } else
        switch (kind) {
        case F16: DOTS(F16); break;
        case BF16: DOTS(BF16); break;
        case U8: DOTS(U8); break;
        default: DOTS(F32);
        }
    for (int g = 0; g < G; g++) {
        const long first = sees[g].first - of->at, last = sees[g].last - of->at;
        for (long s = 0; of->packed && s < GROUP; s++) scores[g * GROUP + s] += lows[g];
        soften(y + g * (D + 2), scores + g * GROUP, first < 0 ? 0 : first, last > of->n ? of->n : last, D);
        if (of->packed) unstep(y + g * (D + 2), scores + g * GROUP, of, D);
    }
    if (G == QUERIES) mix_rows(y, scores, of, F32, QUERIES, D);
    else
        switch (kind) {
        case F16: MIX(F16); break;
        case BF16: MIX(BF16); break;
        case U8: MIX(U8); break;
        default: MIX(F32);
        }
}

/* As q · (step · number + low) = (q · step) · number + q · low: queries [rows, D] times the steps of a group's keys, and
 * their products with the lowest numbers. */
static void step_queries(float *to, float *lows, const float *q, long rows, const struct memory *m, const char *scales,
                         long D) {
    float step[D], low[D];
    widen_all(step, (struct rows){scales, 0}, m->scales, 1, D);
    widen_all(low, (struct rows){scales + m->k_low * size_of[m->scales], 0}, m->scales, 1, D);
    for (long r = 0; r < rows; r++, q += D, to += D) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (long i = 0; i < D; i++) sum += q[i] * low[i];
        for (long i = 0; i < D; i++) to[i] = q[i] * step[i];
        lows[r] = sum;
    }
}

/* Rows of queries over one K/V head's tokens in the slots first to last, of which the first is the token `at`, into
 * y [rows, D + 2] as `soften` has it. */
static void look_at(float *y, const float *q, const struct sight *sees, long rows, const struct memory *m, long h,
                    long first, long last, long at, long D) {
    float __attribute__((aligned(64))) k[GROUP * D], v[GROUP * D], turned[GROUP * D], lows[rows];
    float __attribute__((aligned(64))) stepped[m->kind < U8 ? 1 : rows * D];
    const float *asked = m->kind < U8 ? q : stepped;
    for (long r = 0; r < rows; r++) {
        memset(y + r * (D + 2), 0, D * sizeof *y);
        y[r * (D + 2) + D] = LEAST, y[r * (D + 2) + D + 1] = 0;
    }
    for (long n; first < last; first += n, at += n) {
        const long rest = GROUP - first % GROUP, scale = size_of[m->scales];
        n = last - first < rest ? last - first : rest;
        struct group of = {keys_at(m, h, first), values_at(m, h, first),
                           {keys_at(m, h, first + n), values_at(m, h, first + n)}, at, n, last - first - n,
                           m->kind == U4 ? D / 2 : D * size_of[m->kind], m->kind >= U8};
        if (of.packed) {
            const char *scales = m->v_scales + (h * m->v_scales_head + first) * scale;
            widen_all(of.step, (struct rows){scales, 0}, m->scales, 1, n);
            widen_all(of.low, (struct rows){scales + m->v_low * scale, 0}, m->scales, 1, n);
            step_queries(stepped, lows, q, rows, m, m->k_scales + (h * m->k_scales_head + first / GROUP * D) * scale, D);
        }
        enum kind kind = m->kind;
        if (rows > QUERIES || kind == U4) { /* what is read so often is made floats once */
            widen_all(k, of.k, kind, n, D);
            widen_all(v, of.v, kind, n, D);
            of.k = (struct rows){(char *)k, D * sizeof *k}, of.v = (struct rows){(char *)v, D * sizeof *v};
            kind = F32;
        }
        long r = 0;
        if (rows >= ACROSS) {
            struct group across = of;
            across.k = (struct rows){(char *)turned, GROUP * sizeof *turned};
            for (long s = 0; s < GROUP; s++)
                for (long i = 0; i < D; i++) turned[i * GROUP + s] = s < n ? k[s * D + i] : 0;
            for (; r + QUERIES <= rows; r += QUERIES)
                look(y + r * (D + 2), asked + r * D, lows + r, sees + r, &across, F32, QUERIES, D);
        }
        for (long G; r < rows; r += G) {
            G = rows - r < 3 ? 1 : 3;
            look(y + r * (D + 2), asked + r * D, lows + r, sees + r, &of, kind, G, D);
        }
    }
}

static void keep(const struct memory *m, const float *k, const float *v, long h, long slot, long D) {
    narrow((char *)keys_at(m, h, slot).at, k, m->kind, D);
    narrow((char *)values_at(m, h, slot).at, v, m->kind, D);
}

/* The newest counts[i] tokens of sequence i are queries, and each sees its own sequence up to itself, the newest `window`
 * tokens of that; the sequence lies in the stretches from ends[i - 1] to ends[i], at least what its queries see of it. */
struct seen {
    long sequences, window;
    const long *counts, *ends;
    const struct stretch *stretches;
};

/* softmax(q kᵀ / √D) v for each query, of kv_heads · group heads -> y [queries, heads, D]. Where new_k and new_v are given,
 * they are stored first, in the slots of the queries' own tokens. Rows, of q, new_k and new_v, are in elements. */
struct attend {
    struct job job;
    float *y;
    const float *q, *new_k, *new_v;
    long rows[3];
    const struct memory *memories;
    const struct seen *seen;
    long kv_heads, group, D;
};

/* What is to be looked at, by whom: blocks of queries that see nearly the same, so that what is read serves all of them;
 * pieces of what a block sees, so that few heads keep all threads busy (flash-decoding), with what comes out of each,
 * [kv_heads, queries, group, D + 2]; and for each query its token's slot. */
struct block { long query, count, place, begin, first; }; /* `place` of its first in its sequence, whose stretches `begin` */
struct piece { const struct block *block; struct stretch of; long at; float *parts; };
struct plan {
    long blocks, pieces;
    struct block *block;
    struct piece *piece;
    struct stretch *own;
    float *parts;
};

static long sight_of(const struct seen *seen, long place) {
    return place + 1 > seen->window ? place + 1 - seen->window : 0;
}

/* Fills in the pieces of a block in stretches of at most `each` tokens, or only counts them: returns how many. */
static long cut(const struct seen *seen, const struct block *b, long each, struct piece *to) {
    const long first = sight_of(seen, b->place), last = b->place + b->count;
    long count = 0, at = 0;
    for (const struct stretch *s = seen->stretches + b->begin; at < last; at += s->last - s->first, s++) {
        const long end = at + s->last - s->first < last ? at + s->last - s->first : last;
        for (long from = at > first ? at : first; from < end; from += each, count++) {
            const long upto = from + each < end ? from + each : end;
            if (to) to[count] = (struct piece){b, {s->memory, s->first + from - at, s->first + upto - at}, from, NULL};
        }
    }
    return count;
}

static struct plan *planned(const struct attend *a, long threads) {
    const struct seen *seen = a->seen;
    const long heads = a->kv_heads * a->group, near = NEAR / (a->group * a->D), most = near < 1 ? 1 : near;
    long queries = 0, work = 0, block = 0, blocks = 0, pieces = 0, rows = 0;
    for (long i = 0; i < seen->sequences; i++) {
        queries += seen->counts[i];
        blocks += (seen->counts[i] + most - 1) / most;
    }
    struct plan *plan = malloc(sizeof *plan);
    plan->own = malloc(queries * sizeof *plan->own), plan->block = malloc((blocks + 1) * sizeof *plan->block);
    for (long i = 0, query = 0; i < seen->sequences; i++) {
        const long begin = i ? seen->ends[i - 1] : 0;
        long length = 0;
        for (long s = begin; s < seen->ends[i]; s++) {
            const struct stretch *of = seen->stretches + s;
            length += of->last - of->first;
        }
        for (long s = seen->ends[i], back = 0; back < seen->counts[i];)
            for (long slot = seen->stretches[--s].last; slot > seen->stretches[s].first && back < seen->counts[i]; back++) {
                slot--;
                plan->own[query + seen->counts[i] - 1 - back] = (struct stretch){seen->stretches[s].memory, slot, slot + 1};
            }
        for (long j = 0; j < seen->counts[i]; j += most) {
            const long count = seen->counts[i] - j < most ? seen->counts[i] - j : most;
            const long place = length - seen->counts[i] + j;
            plan->block[block++] = (struct block){query + j, count, place, begin, 0};
            work += place + count - sight_of(seen, place);
        }
        query += seen->counts[i];
    }
    const long splits = (8 * threads + a->kv_heads - 1) / a->kv_heads, groups = (work / splits + GROUP - 1) / GROUP;
    const long each = (groups < 2 ? 2 : groups) * GROUP;
    for (block = 0; block < blocks; block++) {
        plan->block[block].first = pieces;
        const long more = cut(seen, plan->block + block, each, NULL);
        pieces += more, rows += more * plan->block[block].count;
    }
    plan->block[blocks].first = pieces;
    plan->blocks = blocks, plan->pieces = pieces, plan->piece = malloc(pieces * sizeof *plan->piece);
    plan->parts = malloc(rows * heads * (a->D + 2) * sizeof *plan->parts);
    float *parts = plan->parts;
    for (block = 0; block < blocks; block++) cut(seen, plan->block + block, each, plan->piece + plan->block[block].first);
    for (struct piece *p = plan->piece; p < plan->piece + pieces; parts += p++->block->count * heads * (a->D + 2))
        p->parts = parts;
    return plan;
}

/* The queries of a block that share a K/V head, over a piece. */
static void look_through(const struct attend *a, const struct piece *p, long h) {
    const long group = a->group, D = a->D, rows = p->block->count * group;
    const float scale = 1 / root(D);
    float __attribute__((aligned(64))) q[rows * D];
    struct sight sees[rows];
    for (long r = 0; r < rows; r++) {
        const long query = r / group, place = p->block->place + query;
        const float *from = a->q + (p->block->query + query) * a->rows[0] + (h * group + r % group) * D;
        for (long i = 0; i < D; i++) q[r * D + i] = from[i] * scale;
        sees[r] = (struct sight){sight_of(a->seen, place), place + 1};
    }
    look_at(p->parts + h * rows * (D + 2), q, sees, rows, a->memories + p->of.memory, h, p->of.first, p->of.last, p->at, D);
}

/* One head's parts, of pieces that lie `apart` from each other, each as heavy as its exponentials. */
static void merge(float *y, const float *part, const float *end, long apart, long D) {
    float top = LEAST, all = 0;
    for (const float *p = part; p < end; p += apart) top = p[D] > top ? p[D] : top;
    memset(y, 0, D * sizeof *y);
    for (; part < end; part += apart) {
        const float weight = exponential(part[D] - top);
        all += weight * part[D + 1];
        for (long j = 0; j < D; j++) y[j] += weight * part[j];
    }
    for (long j = 0; j < D; j++) y[j] /= all;
}

void attend(const struct job *job) {
    const struct attend *a = (const struct attend *)job;
    const long group = a->group, heads = a->kv_heads * group, D = a->D;
    struct plan *plan;
#pragma omp single copyprivate(plan)
    plan = planned(a, omp_get_num_threads());
    const struct block *end = plan->block + plan->blocks;
    if (a->new_k) {
#pragma omp for schedule(static)
        for (long i = 0; i < (end[-1].query + end[-1].count) * a->kv_heads; i++) {
            const long query = i / a->kv_heads, h = i % a->kv_heads;
            keep(a->memories + plan->own[query].memory, a->new_k + query * a->rows[1] + h * D,
                 a->new_v + query * a->rows[2] + h * D, h, plan->own[query].first, D);
        }
    }
#pragma omp for schedule(dynamic)
    for (long task = plan->pieces * a->kv_heads - 1; task >= 0; task--) /* the longest first: of a prompt, its end */
        look_through(a, plan->piece + task / a->kv_heads, task % a->kv_heads);
#pragma omp for schedule(static)
    for (long i = 0; i < plan->blocks * heads; i++) {
        const struct block *b = plan->block + i / heads;
        const long apart = heads * b->count * (D + 2), h = i % heads / group;
        for (long j = 0; j < b->count; j++) {
            const float *parts = plan->piece[b->first].parts + ((h * b->count + j) * group + i % group) * (D + 2);
            merge(a->y + ((b->query + j) * heads + i % heads) * D, parts, parts + (b[1].first - b->first) * apart, apart, D);
        }
    }
#pragma omp master
    {
        free(plan->parts);
        free(plan->piece);
        free(plan->block);
        free(plan->own);
        free(plan);
    }
}
