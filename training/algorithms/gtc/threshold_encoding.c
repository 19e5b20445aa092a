/* Encode float32 gradients by threshold on a CPU, in one pass at the memory's speed.

   encoding.py defines words and planes, computes the same bits in NumPy and replaces this file
   where there is no C compiler. Little-endian, one thread. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* One build for every x86-64: each loop is compiled three times, and the CPU takes the widest. */
#if defined(__x86_64__) && defined(__GLIBC__)
#define FOR_EACH_CPU __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define FOR_EACH_CPU
#endif

#define GROUP 64 /* elements: their mask of one bit each is a machine word */
#define SIGN_BIT 0x80000000u
#define HEADER_WORDS 2
#define WORD_BITS 32

enum { INDICES, MAP, NOT_FINITE };

static inline int64_t at_most(int64_t value, int64_t bound) {
    return value < bound ? value : bound;
}

/* Pack bytes of 0 or 1 into bits, lowest first: no compiler finds movmskb in C. */
static inline uint64_t packed(const uint8_t *flags) {
    uint64_t mask = 0;
    for (int octet = 0; octet < GROUP / 8; octet++) {
        uint64_t eight;
        memcpy(&eight, flags + 8 * octet, sizeof eight);
        mask |= (eight * 0x0102040810204080u >> 56) << 8 * octet;
    }
    return mask;
}

/* r += g; set a flag where then |r| >= tau. A NaN is not below tau, so its flag is set too. */
static inline void accumulate(float *r, const float *g, int length, float tau, uint8_t *reached) {
    for (int i = 0; i < length; i++) {
        const float sum = r[i] + g[i];
        r[i] = sum;
        reached[i] = !(fabsf(sum) < tau);
    }
}

static inline void accumulate_group(float *r, const float *g, int length, float tau,
                                    uint8_t *reached) {
    if (length == GROUP) { /* a constant length lets the compiler unroll and vectorize */
        accumulate(r, g, GROUP, tau, reached);
        return;
    }
    memset(reached, 0, GROUP);
    accumulate(r, g, length, tau, reached);
}

/* Write a word for each element that reaches the threshold, in order, and subtract what is sent,
   until the model or `room` ends; `words` has space for GROUP more. Return the number of words;
   `end` becomes the first element that was not read. */
FOR_EACH_CPU
static int64_t take_indices(float *residual, const float *gradients, int64_t size, float tau,
                            uint32_t *words, int64_t room, int64_t *end, int *are_finite) {
    int64_t num_sent = 0, first = 0;
    for (; first < size && num_sent <= room; first += GROUP) {
        float *r = residual + first;
        uint8_t reached[GROUP], any = 0;
        accumulate_group(r, gradients + first, (int)at_most(size - first, GROUP), tau, reached);
        for (int i = 0; i < GROUP; i++) any |= reached[i];
        if (!any) continue;
        for (uint64_t left = packed(reached); left; left &= left - 1) {
            const int i = __builtin_ctzll(left);
            *are_finite &= isfinite(r[i]) != 0;
            words[num_sent++] = (uint32_t)(first + i) | (signbit(r[i]) ? SIGN_BIT : 0);
            r[i] -= copysignf(tau, r[i]);
        }
    }
    *end = at_most(first, size);
    return num_sent;
}

/* Write both planes from element `first`, a multiple of GROUP; return the number of sent ones. */
FOR_EACH_CPU
static int64_t take_map(float *residual, const float *gradients, int64_t first, int64_t size,
                        float tau, uint8_t *planes, int64_t plane_bytes, int *are_finite) {
    int64_t num_sent = 0;
    for (; first < size; first += GROUP) {
        float *r = residual + first;
        uint8_t reached[GROUP], below[GROUP] = {0};
        const int length = (int)at_most(size - first, GROUP);
        int finite = 1;
        accumulate_group(r, gradients + first, length, tau, reached);
        for (int i = 0; i < length; i++) {
            finite &= fabsf(r[i]) < INFINITY;
            below[i] = reached[i] & (r[i] < 0);
            r[i] -= reached[i] ? copysignf(tau, r[i]) : 0.0f;
        }
        *are_finite &= finite;
        const uint64_t sent = packed(reached), negative = packed(below);
        const size_t octets = (size_t)at_most(plane_bytes - first / 8, GROUP / 8);
        memcpy(planes + first / 8, &sent, octets);
        memcpy(planes + plane_bytes + first / 8, &negative, octets);
        num_sent += __builtin_popcountll(sent);
    }
    return num_sent;
}

/* Set the bits of the elements that `words` name in both planes. */
static void mark(const uint32_t *words, int64_t num_words, uint8_t *planes, int64_t plane_bytes) {
    for (int64_t number = 0; number < num_words; number++) {
        const uint32_t index = words[number] & ~SIGN_BIT;
        planes[index / 8] |= (uint8_t)(1u << index % 8);
        planes[plane_bytes + index / 8] |= (uint8_t)((words[number] >> 31) << index % 8);
    }
}

/* Write a message; the buffer has space for a map and GROUP words more. Return its length in words,
   or -1 if there is no memory for a map. */
int64_t take_message(float *residual, const float *gradients, int64_t size, float tau,
                     uint32_t *message) {
    const int64_t plane_bytes = (size + WORD_BITS - 1) / WORD_BITS * 4, room = plane_bytes / 2;
    uint32_t *body = message + HEADER_WORDS;
    int64_t end;
    int are_finite = 1;
    int64_t num_sent =
        take_indices(residual, gradients, size, tau, body, room, &end, &are_finite);
    int64_t length = num_sent;
    message[0] = INDICES;
    if (num_sent > room) { /* only now it is known that a map is shorter */
        uint8_t *planes = calloc(2, (size_t)plane_bytes);
        if (planes == NULL) return -1;
        mark(body, num_sent, planes, plane_bytes);
        num_sent +=
            take_map(residual, gradients, end, size, tau, planes, plane_bytes, &are_finite);
        memcpy(body, planes, 2 * (size_t)plane_bytes);
        free(planes);
        message[0] = MAP;
        length = room;
    }
    message[1] = (uint32_t)num_sent;
    if (are_finite) return HEADER_WORDS + length;
    message[0] = NOT_FINITE;
    return HEADER_WORDS;
}

/* Add the signs of a message's words to `counts`, up to the first index beyond `size`; return the
   number of words added. */
int64_t add_indices(int32_t *counts, int64_t size, const uint32_t *words, int64_t num_words) {
    for (int64_t number = 0; number < num_words; number++) {
        const uint32_t index = words[number] & ~SIGN_BIT;
        if (index >= size) return number;
        counts[index] += words[number] & SIGN_BIT ? -1 : 1;
    }
    return num_words;
}

/* Add the signs of a map's planes to `counts`. */
FOR_EACH_CPU
void add_map(int32_t *counts, int64_t size, const uint32_t *sent, const uint32_t *negative) {
    for (int64_t first = 0; first < size; first += WORD_BITS) {
        const uint32_t s = sent[first / WORD_BITS], n = negative[first / WORD_BITS];
        const int length = (int)at_most(size - first, WORD_BITS);
        for (int i = 0; i < length; i++)
            counts[first + i] += (int32_t)(s >> i & 1) - 2 * (int32_t)(n >> i & 1);
    }
}
