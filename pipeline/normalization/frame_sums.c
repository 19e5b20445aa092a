/* Subtract a stream's causal means from its frames, and sum frames up, each frame in one go.

   causal_mean.py has the same arithmetic in NumPy, bit for bit, and does without this file where
   there is no C compiler. Sums go from frame to frame, never across bins, so that their order is the
   stream's. Little-endian, one thread. */

#include <stdint.h>
#include <string.h>

/* One build for every x86-64: each loop is compiled three times, and the CPU takes the widest. */
#if defined(FOR_EACH_CPU)
/* a build for one CPU alone */
#elif defined(__x86_64__) && defined(__GLIBC__)
#define FOR_EACH_CPU __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define FOR_EACH_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Round to float16, ties to even. */
INLINE uint16_t half_of(float value) {
    const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
    /* 13 bits of the fraction go; adding almost half of their unit, or half where odd, rounds. */
    const uint32_t normal = (size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13;
    /* Below 2^-14 a float32 of 0.5 has the unit of float16's subnormal numbers, 2^-24. */
    const uint32_t subnormal = bits_of(float_of(size) + 0.5f) - 0x3F000000;
    const uint32_t other = size > 0x7F800000 ? 0x7E00 : 0x7C00; /* NaN, infinity */
    const uint32_t half = size >= 0x477FF000 ? other : size < 0x38800000 ? subnormal : normal;
    return (uint16_t)(sign | half);
}

/* Widen a float16 that is finite: its fraction and exponent in place, times 2^112, are exact. */
INLINE float float_of_half(uint16_t half) {
    const float size = float_of((uint32_t)(half & 0x7FFF) << 13) * 0x1p112f;
    return float_of(bits_of(size) | (uint32_t)(half & 0x8000) << 16);
}

/* Advance the stream's sum by each frame, and write what is left without its causal mean. */
INLINE void subtract_mean(double *sum, int64_t count, const float *restrict frame,
                          float *restrict left, int64_t num_bins) {
    const double share = 1.0 / (double)count;
    for (int64_t b = 0; b < num_bins; b++) {
        sum[b] += (double)frame[b];
        left[b] = (float)((double)frame[b] - sum[b] * share);
    }
}

/* Write what is left as float16. `count` frames came before; `sum` is theirs, and then that of
   all. */
FOR_EACH_CPU
void subtract_causal_means_to_half(double *sum, int64_t count, const float *energies,
                                   int64_t num_frames, uint16_t *restrict halves,
                                   int64_t num_bins) {
    float left[num_bins];
    for (int64_t frame = 0; frame < num_frames; frame++) {
        subtract_mean(sum, count + frame + 1, energies + frame * num_bins, left, num_bins);
        for (int64_t b = 0; b < num_bins; b++) halves[frame * num_bins + b] = half_of(left[b]);
    }
}

/* Add frames of float16, and their squares, to `sum` and `squares`. */
FOR_EACH_CPU
void add_moments(const uint16_t *frames, int64_t num_frames, double *sum, double *squares,
                 int64_t num_bins) {
    for (int64_t frame = 0; frame < num_frames; frame++)
        for (int64_t b = 0; b < num_bins; b++) {
            const double value = (double)float_of_half(frames[frame * num_bins + b]);
            sum[b] += value;
            squares[b] += value * value;
        }
}
