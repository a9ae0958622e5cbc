"""Injection: wrong readings of rotations, codecs, wrappers and the fusion of rankings."""

from typing import Any

import numpy as np

from conformance.assurance.saboteurs.registry import Array, instead_of
from reference.injection.diagnostics import bands, entropy, key_cosine, sink_mass
from reference.injection.fusion import fused
from reference.injection.quantisers import codes, quantised_region, scale
from reference.injection.rotation import rebase_angles, shift_angles, turn_half_split, turn_interleaved
from reference.injection.splicing import Held, first_tokens, held, most_deviating, placed
from reference.injection.wrappers import Wrapped, marker_id, slices, wrap

__all__: list[str] = []


@instead_of(shift_angles, "IN-SHIFT-ANGLES")
def by_the_token_s_own_position(n: int, start: int, theta: Array) -> Array:
    """Token t turns by start + t: its own index a second time."""
    angles: Array = (start + np.arange(n, dtype=np.float64))[:, None] * theta
    return angles


@instead_of(shift_angles, "IN-SHIFT-ANGLES")
def in_single_precision_angles(n: int, start: int, theta: Array) -> Array:
    """The product is rounded to float32."""
    return np.tile((np.float32(start) * theta.astype(np.float32)).astype(np.float64), (n, 1))


@instead_of(shift_angles, "IN-SHIFT-ANGLES")
def backwards(n: int, start: int, theta: Array) -> Array:
    """The keys turn back, as if they stood at `start` already."""
    return np.tile(-start * theta, (n, 1))


@instead_of(rebase_angles, "IN-REBASE-ANGLES")
def by_the_live_frequencies_alone(n: int, start: int, archived: Array, live: Array) -> Array:
    """The archive's own rotation is left in the keys."""
    return np.tile(start * live, (n, 1))


@instead_of(rebase_angles, "IN-REBASE-ANGLES")
def by_the_archive_s_frequencies(n: int, start: int, archived: Array, live: Array) -> Array:
    """The frequencies are not exchanged."""
    return np.tile(start * archived, (n, 1))


@instead_of(turn_half_split, "IN-HALF-SPLIT")
def halves_of_the_whole_head(x: Array, angles: Array) -> Array:
    """A partial rotation pairs channel i with channel d / 2 + i."""
    half, pairs = x.shape[-1] // 2, angles.shape[1]
    turned, cos, sin = x.copy(), np.cos(angles), np.sin(angles)
    turned[..., :pairs] = x[..., :pairs] * cos - x[..., half : half + pairs] * sin
    turned[..., half : half + pairs] = x[..., :pairs] * sin + x[..., half : half + pairs] * cos
    return turned


@instead_of(turn_half_split, "IN-HALF-SPLIT")
def half_split_as_interleaved(x: Array, angles: Array) -> Array:
    """Pairs are side by side."""
    return turn_interleaved(x, angles)


@instead_of(turn_half_split, "IN-HALF-SPLIT")
def negative_zeros_lost(x: Array, angles: Array) -> Array:
    """An angle of 0 is a product with 1 and a difference of 0."""
    return turn_half_split(x + 0.0, angles)


@instead_of(turn_interleaved, "IN-INTERLEAVED")
def interleaved_as_half_split(x: Array, angles: Array) -> Array:
    """Pairs are pairs of halves."""
    return turn_half_split(x, angles)


@instead_of(turn_interleaved, "IN-INTERLEAVED")
def the_last_channels_turn(x: Array, angles: Array) -> Array:
    """A partial rotation turns the last channels, as in an expanded latent cache."""
    skip = x.shape[-1] - 2 * angles.shape[1]
    return np.concatenate([x[..., :skip], turn_interleaved(x[..., skip:], angles)], axis=-1)


@instead_of(scale, "IN-SCALE")
def full_range(x: Array, axes: tuple[int, ...], bits: int) -> Array:
    """The largest value is divided by 2^(bits - 1)."""
    step: Array = np.maximum(np.abs(x).max(axis=axes, keepdims=True) / 2 ** (bits - 1), 2.0**-126)
    return step.astype(np.float32).astype(np.float64)


@instead_of(scale, "IN-SCALE")
def zero_for_a_group_of_zeros(x: Array, axes: tuple[int, ...], bits: int) -> Array:
    """The scale is not clamped."""
    step = scale(x, axes, bits)
    unclamped: Array = np.where(step == 2.0**-126, 0.0, step)
    return unclamped


@instead_of(scale, "IN-SCALE")
def per_head_called_per_channel(x: Array, axes: tuple[int, ...], bits: int) -> Array:
    """A scale per channel is a scale per head."""
    return scale(x, (1, 2) if axes == (1,) else axes, bits)


@instead_of(codes, "IN-CODES")
def asymmetric_range(x: Array, step: Array, bits: int) -> Array:
    """Codes reach down to -2^(bits - 1), as the paper prints."""
    q = 2 ** (bits - 1)
    return np.clip(np.rint(x / step), -q, q - 1).astype(np.int64)


@instead_of(codes, "IN-CODES")
def halves_away_from_zero(x: Array, step: Array, bits: int) -> Array:
    """A half is rounded away from 0."""
    q = 2 ** (bits - 1) - 1
    quotient = x / step
    rounded: Array = np.clip(np.sign(quotient) * np.floor(np.abs(quotient) + 0.5), -q, q).astype(np.int64)
    return rounded


@instead_of(quantised_region, "IN-ARMS")
def an_odd_layer_is_lower(arm: Any, layers: int, n: int) -> tuple[range, range]:
    """The middle of an odd number of layers belongs to the lower half."""
    middle = (layers + 1) // 2
    halves = {"all": range(layers), "lower": range(middle), "upper": range(middle, layers)}
    return halves[arm.half], quantised_region(arm, layers, n)[1]


@instead_of(quantised_region, "IN-ARMS")
def the_last_tokens_are_quantised(arm: Any, layers: int, n: int) -> tuple[range, range]:
    """Only the first tokens stay as they were."""
    return quantised_region(arm, layers, n)[0], range(min(arm.first, n), n)


@instead_of(marker_id, "IN-MARKER")
def the_first_of_several_ids(marker: Any, vocabulary: Any) -> int:
    """A marker of several ids is its first one."""
    return int(vocabulary.encode(marker.text)[0])


@instead_of(marker_id, "IN-MARKER")
def the_unknown_token_is_a_marker(marker: Any, vocabulary: Any) -> int:
    """One id is enough, whatever it stands for."""
    ids = vocabulary.encode(marker.text)
    return int(ids[0]) if len(ids) == 1 else marker_id(marker, vocabulary)


@instead_of(wrap, "IN-WRAP")
def nothing_is_hidden(form: Any, chunk: Any, vocabulary: Any) -> Wrapped:
    """A hidden preamble is spliced with the rest."""
    found = wrap(form, chunk, vocabulary)
    return Wrapped(found.ids, 0, found.markers, found.start, found.stop)


@instead_of(wrap, "IN-WRAP")
def markers_counted_from_the_chunk(form: Any, chunk: Any, vocabulary: Any) -> Wrapped:
    """Positions of markers count from the first spliced token."""
    found = wrap(form, chunk, vocabulary)
    markers = tuple(at - found.hidden for at in found.markers if at >= found.hidden)
    return Wrapped(found.ids, found.hidden, markers, found.start, found.stop)


@instead_of(slices, "IN-SLICES")
def a_chunk_a_sentence(ids: Any, ends: Any, size: int) -> list[tuple[int, int]]:
    """A chunk ends at the first sentence end."""
    found = slices(ids, ends, size)
    return [
        piece for start, stop in found
        for piece in ([(start, start + 1), (start + 1, stop)] if stop - start > 1 and ids[start] in ends
                      else [(start, stop)])
    ]


@instead_of(slices, "IN-SLICES")
def the_rest_is_cut_too(ids: Any, ends: Any, size: int) -> list[tuple[int, int]]:
    """The last chunk ends at its last sentence end, and what follows is another."""
    found = slices(ids, ends, size)
    if not found:
        return found
    start, stop = found[-1]
    clean = [at + 1 for at in range(start, stop) if ids[at] in ends]
    return found if not clean or clean[-1] == stop else [*found[:-1], (start, clean[-1]), (clean[-1], stop)]


@instead_of(fused, "IN-FUSE")
def ranks_from_zero(rankings: Any, k: int = 60) -> Any:
    """The first rank is 0."""
    return fused(rankings, k - 1) if k else fused(rankings, k)


@instead_of(fused, "IN-FUSE")
def ties_as_they_come(rankings: Any, k: int = 60) -> Any:
    """Equal scores stay in the order in which they were first named."""
    first = list(dict.fromkeys(name for ranking in rankings for name in ranking))
    return sorted(fused(rankings, k), key=lambda pair: (-round(pair[1], 12), first.index(pair[0])))


@instead_of(placed, "IN-PLACES")
def gaps_are_closed(n: int, hidden: int, start: int, kept: Array) -> Any:
    """Stored tokens stand side by side, and what follows right behind them."""
    shown = int((kept >= hidden).sum())
    placed(n, hidden, start, kept)
    return start + np.arange(shown), start + shown


@instead_of(placed, "IN-PLACES")
def a_hidden_preamble_has_room(n: int, hidden: int, start: int, kept: Array) -> Any:
    """Visible tokens stand behind the hidden ones."""
    found, following = placed(n, hidden, start, kept)
    return found + hidden, following + hidden


@instead_of(held, "IN-BASELINES")
def a_still_chunk_shifts_the_next(arm: str, session: Any, prefix: Any, raw: Any, wrapped: Any) -> Held:
    """Without a shift, chunks follow each other from position 0."""
    found = held(arm, session, prefix, raw, wrapped)
    if arm != "no_shift":
        return found
    n = len(found.ids)
    return Held(found.ids, found.live, (*range(found.live), *range(n - found.live)))


@instead_of(held, "IN-BASELINES")
def the_prefix_before_every_chunk(arm: str, session: Any, prefix: Any, raw: Any, wrapped: Any) -> Held:
    """The prefix arm repeats the wrapper's prefix."""
    if arm != "prefix":
        return held(arm, session, prefix, raw, wrapped)
    return held("inject", session, prefix, raw, [[*prefix, *chunk] for chunk in raw])


@instead_of(held, "IN-BASELINES")
def five_sinks(arm: str, session: Any, prefix: Any, raw: Any, wrapped: Any) -> Held:
    """BOS, and four positions behind it."""
    if arm != "global_sink":
        return held(arm, session, prefix, raw, wrapped)
    return held("inject_raw", session[:5], prefix, raw, wrapped)


@instead_of(first_tokens, "IN-LEGOLINK")
def of_the_first_chunk(start: int, lengths: Any, k: int) -> list[int]:
    """Only the first chunk's tokens are computed again."""
    return first_tokens(start, lengths[:1], k)


@instead_of(first_tokens, "IN-LEGOLINK")
def beyond_a_short_chunk(start: int, lengths: Any, k: int) -> list[int]:
    """k tokens from the start of each chunk, also where it is shorter."""
    first_tokens(start, lengths, k)
    starts = [start + sum(lengths[:at]) for at in range(len(lengths))]
    return sorted({own + at for own in starts for at in range(k)})


@instead_of(most_deviating, "IN-CACHEBLEND")
def the_later_of_equal_ones(spliced: Array, fresh: Array, start: int, r: float) -> list[int]:
    """Of equal deviations the later token is taken."""
    n = spliced.shape[1]
    found = most_deviating(spliced[:, ::-1], fresh[:, ::-1], 0, r)
    return sorted(start + n - 1 - at for at in found)


@instead_of(most_deviating, "IN-CACHEBLEND")
def a_rounded_product(spliced: Array, fresh: Array, start: int, r: float) -> list[int]:
    """r n is a product in float64."""
    n = spliced.shape[1]
    return most_deviating(spliced, fresh, start, int(r * n) / n if 0 <= r <= 1 else r)


@instead_of(most_deviating, "IN-CACHEBLEND")
def the_first_head_alone(spliced: Array, fresh: Array, start: int, r: float) -> list[int]:
    """Other heads do not count."""
    return most_deviating(spliced[:1], fresh[:1], start, r)


@instead_of(entropy, "IN-ENTROPY")
def in_bits(weights: Array) -> Array:
    """The logarithm is to base 2."""
    found: Array = entropy(weights) / np.log(2)
    return found


@instead_of(entropy, "IN-ENTROPY")
def a_small_number_in_the_logarithm(weights: Array) -> Array:
    """log(a + 1e-9), so that no weight is 0."""
    found: Array = -(weights * np.log(weights + 1e-9)).sum(-1)
    return found


@instead_of(sink_mass, "IN-SINK-MASS")
def the_first_slots(weights: Array, positions: Array, sinks: int = 4) -> Array:
    """Slots are taken for positions."""
    return sink_mass(weights, np.arange(len(positions)), sinks)


@instead_of(sink_mass, "IN-SINK-MASS")
def one_sink_too_many(weights: Array, positions: Array, sinks: int = 4) -> Array:
    """Position 4 is a sink."""
    return sink_mass(weights, positions, sinks + 1)


@instead_of(key_cosine, "IN-KEY-COSINE")
def turned_on(archived: Array, fresh: Array, positions: Any, theta: Array, style: str) -> Any:
    """The rotation is put on again, not taken off."""
    return key_cosine(archived, fresh, tuple(-at for at in positions), theta, style)


@instead_of(key_cosine, "IN-KEY-COSINE")
def by_the_archive_s_positions(archived: Array, fresh: Array, positions: Any, theta: Array, style: str) -> Any:
    """Both keys are turned back as if they had been computed where the archive was."""
    return key_cosine(archived, fresh, (positions[0], positions[0]), theta, style)


@instead_of(bands, "IN-BANDS")
def the_paper_s_own_layers(depth: int) -> Any:
    """Bands are not scaled."""
    return {name: (min(low, depth), min(high, depth)) for name, (low, high) in bands(40).items()} if depth else bands(0)


@instead_of(bands, "IN-BANDS")
def bands_may_be_empty(depth: int) -> Any:
    """A band that scales to nothing has no layer."""
    low_and_high = {"early": (0, 6), "mid": (10, 16), "upper": (20, 33), "all": (0, 40)}
    bands(depth)
    return {name: (low * depth // 40, high * depth // 40) for name, (low, high) in low_and_high.items()}
