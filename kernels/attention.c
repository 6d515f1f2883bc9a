/* The attention of single tokens, each over what its sequence holds, of heads whose size D is a multiple of LANES, or in 4
 * bits of twice that. */

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

/* Query i sees the stretches from ends[i - 1] to ends[i]. */
struct seen {
    long queries;
    const long *ends;
    const struct stretch *stretches;
};

/* softmax(q kᵀ / √D) v for each of some queries of kv_heads · group heads -> y [queries, heads, D]. Where new_k and new_v
 * are given, they are stored first, each query's in the last slot that it sees. Rows, of q, new_k and new_v, are in
 * elements. */
struct attend {
    struct job job;
    float *y;
    const float *q, *new_k, *new_v;
    long rows[3];
    const struct memory *memories;
    const struct seen *seen;
    long kv_heads, group, D;
};

/* What is to be looked at, in pieces, those of query i from firsts[i] to firsts[i + 1]; what comes out of each piece and
 * head; and q / √D. Long stretches are split, so that few heads keep all threads busy (flash-decoding). */
struct plan {
    long pieces, *firsts;
    struct piece { long query; struct stretch of; } *piece;
    float *parts, *scaled;
};

static struct plan *planned(const struct attend *a, long threads) {
    const struct seen *seen = a->seen;
    const long queries = seen->queries, last = seen->ends[queries - 1], heads = a->kv_heads * a->group, D = a->D;
    long total = 0, pieces = 0;
    for (long i = 0; i < last; i++) total += seen->stretches[i].last - seen->stretches[i].first;
    const long splits = (8 * threads + a->kv_heads - 1) / a->kv_heads, groups = (total / splits + GROUP - 1) / GROUP;
    const long each = (groups < 2 ? 2 : groups) * GROUP;
    for (long i = 0; i < last; i++) pieces += (seen->stretches[i].last - seen->stretches[i].first + each - 1) / each;

    struct plan *plan = malloc(sizeof *plan + (queries + 1) * sizeof(long) + pieces * sizeof *plan->piece);
    plan->pieces = 0, plan->firsts = (long *)(plan + 1), plan->piece = (struct piece *)(plan->firsts + queries + 1);
    plan->parts = malloc(sizeof(float) * heads * (pieces * (D + 2) + queries * D));
    plan->scaled = plan->parts + heads * pieces * (D + 2);
    for (long i = 0, at = 0; i < queries; i++) {
        for (plan->firsts[i] = plan->pieces; at < seen->ends[i]; at++) {
            struct stretch left = seen->stretches[at];
            for (; left.first < left.last; left.first += each) {
                struct piece *next = plan->piece + plan->pieces++;
                *next = (struct piece){i, left};
                if (left.last - left.first > each) next->of.last = left.first + each;
            }
        }
        for (long j = 0; j < heads * D; j++) plan->scaled[i * heads * D + j] = a->q[i * a->rows[0] + j] / root(D);
        const struct stretch newest = seen->stretches[seen->ends[i] - 1];
        for (long h = 0; a->new_k && h < a->kv_heads; h++)
            keep(a->memories + newest.memory, a->new_k + i * a->rows[1] + h * D, a->new_v + i * a->rows[2] + h * D, h,
                 newest.last - 1, D);
    }
    plan->firsts[queries] = plan->pieces;
    return plan;
}

/* One head's parts, of pieces that lie `apart` from each other, each as heavy as its exponentials. */
static void merge(float *y, const float *part, const float *end, long apart, long D) {
    float top = -3e38f, all = 0;
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
    const long heads = a->kv_heads * a->group, D = a->D, apart = heads * (D + 2);
    struct plan *plan;
#pragma omp single copyprivate(plan)
    plan = planned(a, omp_get_num_threads());
#pragma omp for schedule(dynamic)
    for (long task = 0; task < plan->pieces * a->kv_heads; task++) {
        const struct piece p = plan->piece[task / a->kv_heads];
        const long h = task % a->kv_heads;
        look_at(plan->parts + task * a->group * (D + 2), plan->scaled + (p.query * heads + h * a->group) * D,
                a->memories + p.of.memory, h, p.of.first, p.of.last, a->group, D);
    }
#pragma omp for schedule(static)
    for (long i = 0; i < a->seen->queries * heads; i++) {
        const float *parts = plan->parts + i % heads * (D + 2);
        const long *firsts = plan->firsts + i / heads;
        merge(a->y + i * D, parts + firsts[0] * apart, parts + firsts[1] * apart, apart, D);
    }
#pragma omp master
    {
        free(plan->parts);
        free(plan);
    }
}
