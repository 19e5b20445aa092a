"""Draw room impulse responses by the image method, each from another room."""

import numpy as np
from jaxtyping import Float32

from jobs.synthesis.demo_extra import import_pyroomacoustics
from pipeline.audio.placements import NUM_ROOMS, PLACEMENTS, Acoustics, Sound
from pipeline.filterbank import SAMPLE_RATE_HZ

# Beyond order 40 a 0.70 s room gains nothing (0.75 for 0.79 s measured) and takes 40 x as long.
_MAX_ORDER = 40
_TYPICAL_ROOM_M = np.array([6.0, 5.0, 2.8])
_WALL_CLEARANCE_M = 0.25


def draw_rooms(noises: tuple[Sound, ...], generator: np.random.Generator) -> Acoustics:
    """Draw four rooms for each placement, in which these noises are heard."""
    responses = {
        place.name: tuple(
            draw_impulse_response(place.distance_m, place.reverberation_time_s, generator)
            for _ in range(NUM_ROOMS)
        )
        for place in PLACEMENTS
    }
    return Acoustics(responses, noises)


def draw_impulse_response(
    distance_m: float, reverberation_time_s: float, generator: np.random.Generator
) -> Float32[np.ndarray, " taps"]:
    """Draw a room of about 6 x 5 x 2.8 m, a device and a speaker `distance_m` apart in it.

    The direct sound is tap 0 and has the value 1; the response lasts `reverberation_time_s`.
    """
    acoustics = import_pyroomacoustics()
    size_m = _TYPICAL_ROOM_M * generator.uniform(0.92, 1.08, 3)
    source, microphone = _draw_positions(distance_m, size_m, generator)
    # Sabine's formula, inverted, gives the walls' absorption for this RT60.
    absorption, order = acoustics.inverse_sabine(reverberation_time_s, size_m)
    room = acoustics.ShoeBox(
        size_m,
        fs=SAMPLE_RATE_HZ,
        materials=acoustics.Material(absorption),
        max_order=min(order, _MAX_ORDER),
    )
    room.add_source(source)
    room.add_microphone(microphone)
    room.compute_rir()
    response = np.asarray(room.rir[0][0])
    # Without the direct sound's delay the phones keep their times.
    direct = round(distance_m / acoustics.constants.get("c") * SAMPLE_RATE_HZ)
    direct += acoustics.constants.get("frac_delay_length") // 2
    kept = response[direct : direct + round(reverberation_time_s * SAMPLE_RATE_HZ)]
    return np.asarray(kept / kept[0], np.float32)


def _draw_positions(
    distance_m: float, size_m: np.ndarray, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    low, high = _WALL_CLEARANCE_M, size_m - _WALL_CLEARANCE_M
    while True:
        mouth = generator.uniform(low, high)
        mouth[2] = generator.uniform(1.2, 1.8)
        device = generator.uniform(low, high)
        device[2] = generator.uniform(0.6, 1.4)
        separation = device - mouth
        device = mouth + separation * distance_m / np.linalg.norm(separation)
        if (device > low).all() and (device < high).all():
            return mouth, device
