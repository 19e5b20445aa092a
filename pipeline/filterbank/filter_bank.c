/* Compute log-mel energies of eight frames side by side, each in a lane of its own.

   log_mel.py has the same arithmetic in NumPy, bit for bit, and replaces this file where there is no
   C compiler; read the equations there. A lane never meets another one, so that a frame's bits
   depend on its own samples alone, and on no width of the CPU's vectors. Little-endian, one thread. */

#include <stdint.h>
#include <string.h>

/* One build for every x86-64: the loop is compiled three times, and the CPU takes the widest. */
#if defined(FOR_EACH_CPU)
/* a build for one CPU alone */
#elif defined(__x86_64__) && defined(__GLIBC__)
#define FOR_EACH_CPU __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define FOR_EACH_CPU
#endif
#define INLINE static inline __attribute__((always_inline))
#define FOR_LANES for (int l = 0; l < LANES; l++)

enum { LANES = 8, WINDOW = 400, SHIFT = 160, PART = 80, POINTS = 256, DEGREE = 8 };

typedef float Lanes[LANES];

/* Tables that log_mel.py computes, so that both have the same bits. */
typedef struct {
    const float *window;          /* [400] */
    const float *cosines, *sines; /* [512], of -2 pi k / 512 */
    const int32_t *mel_starts;    /* [num_bins + 1], compressed sparse rows */
    const int32_t *mel_columns;
    const float *mel_weights;
    const float *log_coefficients; /* [9] */
    float dc_gain, offset_gain, lowest_energy, sqrt_half, log_2_high, log_2_low;
    int32_t num_bins;
} Tables;

typedef struct {
    Lanes real[POINTS], imaginary[POINTS];
} Points;

INLINE float part_sum(const float *samples) {
    float lanes[8];
    for (int i = 0; i < 8; i++) lanes[i] = samples[i];
    for (int octet = 8; octet < PART; octet += 8)
        for (int i = 0; i < 8; i++) lanes[i] += samples[octet + i];
    for (int i = 0; i < 4; i++) lanes[i] += lanes[i + 4];
    for (int i = 0; i < 2; i++) lanes[i] += lanes[i + 2];
    return lanes[0] + lanes[1];
}

/* Remove DC, pre-emphasize and window one frame; its first sample is 0, as the window is. */
INLINE void window_frame(const Tables *t, const float *samples, float *frame) {
    float sum = part_sum(samples);
    for (int part = PART; part < WINDOW; part += PART) sum += part_sum(samples + part);
    const float offset = t->offset_gain * sum, gain = t->dc_gain;
    frame[0] = 0;
    for (int i = 1; i < WINDOW; i++) {
        const float emphasized = gain * samples[i - 1] + (samples[i] - samples[i - 1]);
        frame[i] = (emphasized - offset) * t->window[i];
    }
}

/* One pass of radix 4 over groups of `stride` points that are transformed already. */
INLINE void radix_4_pass(const Tables *t, int stride, const Points *restrict x,
                         Points *restrict y) {
    const int quarter = POINTS / (4 * stride);
    for (int p = 0; p < quarter; p++) {
        const int angle = 2 * stride * p;
        const float w1r = t->cosines[angle], w1i = t->sines[angle];
        const float w2r = t->cosines[2 * angle], w2i = t->sines[2 * angle];
        const float w3r = t->cosines[3 * angle], w3i = t->sines[3 * angle];
        for (int q = 0; q < stride; q++) {
            const int from = p * stride + q, to = 4 * p * stride + q, step = quarter * stride;
            FOR_LANES {
                const float ar = x->real[from][l], ai = x->imaginary[from][l];
                const float br = x->real[from + step][l], bi = x->imaginary[from + step][l];
                const float cr = x->real[from + 2 * step][l], ci = x->imaginary[from + 2 * step][l];
                const float dr = x->real[from + 3 * step][l], di = x->imaginary[from + 3 * step][l];
                const float z1r = (ar - cr) + (bi - di), z1i = (ai - ci) - (br - dr);
                const float z2r = (ar + cr) - (br + dr), z2i = (ai + ci) - (bi + di);
                const float z3r = (ar - cr) - (bi - di), z3i = (ai - ci) + (br - dr);
                y->real[to][l] = (ar + cr) + (br + dr);
                y->imaginary[to][l] = (ai + ci) + (bi + di);
                const int k = stride, is_last = quarter == 1;
                y->real[to + k][l] = is_last ? z1r : w1r * z1r - w1i * z1i;
                y->imaginary[to + k][l] = is_last ? z1i : w1r * z1i + w1i * z1r;
                y->real[to + 2 * k][l] = is_last ? z2r : w2r * z2r - w2i * z2i;
                y->imaginary[to + 2 * k][l] = is_last ? z2i : w2r * z2i + w2i * z2r;
                y->real[to + 3 * k][l] = is_last ? z3r : w3r * z3r - w3i * z3i;
                y->imaginary[to + 3 * k][l] = is_last ? z3i : w3r * z3i + w3i * z3r;
            }
        }
    }
}

/* Four times the power of FFT bins 1 to 255, by the terms that bins k and 256 - k share. */
INLINE void power_of(const Tables *t, const Points *z, Lanes *power) {
    FOR_LANES power[0][l] = 0;
    for (int k = 1; k <= POINTS / 2; k++) {
        const int m = POINTS - k;
        const float wr = t->cosines[k], wi = t->sines[k];
        FOR_LANES {
            const float er = z->real[k][l] + z->real[m][l];
            const float ei = z->imaginary[k][l] - z->imaginary[m][l];
            const float dr = z->real[k][l] - z->real[m][l];
            const float di = z->imaginary[k][l] + z->imaginary[m][l];
            const float tr = wr * dr - wi * di, ti = wr * di + wi * dr;
            power[m][l] = (er - ti) * (er - ti) + (ei + tr) * (ei + tr);
            power[k][l] = (er + ti) * (er + ti) + (ei - tr) * (ei - tr);
        }
    }
}

/* Natural logarithms of normal numbers, by Cephes' polynomial. */
INLINE void log_of(const Tables *t, Lanes values) {
    const float *coefficients = t->log_coefficients;
    FOR_LANES {
        int32_t bits, fraction_bits;
        float fraction;
        memcpy(&bits, &values[l], sizeof bits);
        fraction_bits = (bits & 0x7FFFFF) | 0x3F000000;
        memcpy(&fraction, &fraction_bits, sizeof fraction);
        const int is_low = fraction < t->sqrt_half;
        const float x = (is_low ? fraction + fraction : fraction) - 1.0f;
        const float exponent = (float)((bits >> 23) - 126) - (float)is_low;
        const float square = x * x;
        float y = coefficients[0];
        for (int i = 1; i <= DEGREE; i++) y = y * x + coefficients[i];
        y = y * x * square;
        y = y + t->log_2_low * exponent;
        y = y - 0.5f * square;
        values[l] = (x + y) + t->log_2_high * exponent;
    }
}

/* One bin's energy of all lanes, in the order of the FFT's bins. */
INLINE void mel_energy(const Tables *t, int bin, const Lanes *power, Lanes energy) {
    FOR_LANES energy[l] = 0;
    for (int i = t->mel_starts[bin]; i < t->mel_starts[bin + 1]; i++) {
        const float *row = power[t->mel_columns[i]];
        const float weight = t->mel_weights[i];
        FOR_LANES energy[l] += weight * row[l];
    }
    FOR_LANES energy[l] = energy[l] < t->lowest_energy ? t->lowest_energy : energy[l];
}

/* Lay frames into lanes: even samples are real parts, odd ones imaginary, and zeros follow. */
INLINE void load_frames(const Tables *t, const float *samples, int num_frames, Points *points) {
    float frame[WINDOW];
    memset(points->real[WINDOW / 2], 0, (POINTS - WINDOW / 2) * sizeof(Lanes));
    memset(points->imaginary[WINDOW / 2], 0, (POINTS - WINDOW / 2) * sizeof(Lanes));
    for (int l = 0; l < num_frames; l++) {
        window_frame(t, samples + l * SHIFT, frame);
        for (int k = 0; k < WINDOW / 2; k++) {
            points->real[k][l] = frame[2 * k];
            points->imaginary[k][l] = frame[2 * k + 1];
        }
    }
}

/* Write the energies of `num_frames` frames, each of `num_bins`; frames begin 160 samples apart. */
FOR_EACH_CPU
void log_mel_energies(const Tables *t, const float *samples, int64_t num_frames, float *energies) {
    static _Thread_local Points first, second;
    Lanes power[POINTS], energy;
    for (int64_t frame = 0; frame < num_frames; frame += LANES) {
        const int num_lanes = num_frames - frame < LANES ? (int)(num_frames - frame) : LANES;
        load_frames(t, samples + frame * SHIFT, num_lanes, &first);
        radix_4_pass(t, 1, &first, &second);
        radix_4_pass(t, 4, &second, &first);
        radix_4_pass(t, 16, &first, &second);
        radix_4_pass(t, 64, &second, &first);
        power_of(t, &first, power);
        for (int bin = 0; bin < t->num_bins; bin++) {
            mel_energy(t, bin, power, energy);
            log_of(t, energy);
            for (int l = 0; l < num_lanes; l++)
                energies[(frame + l) * t->num_bins + bin] = energy[l];
        }
    }
}
