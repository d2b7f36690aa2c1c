"""Small functions that use a length as a number, as a position or as a count; arguments as in `functions.py`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

CASES: dict[str, object] = {}


def case(fn):
    """Register a function under its name."""
    CASES[fn.__name__] = fn
    return fn


# Comparisons.


@case
def times_a_comparison(x):
    return x * (x.shape[1] > 6)


@case
def plus_two_comparisons(x):
    return x + (x.shape[1] >= 5) + (x.shape[1] != 7)


@case
def full_of_a_comparison(x):
    return x * torch.full((4,), x.shape[1] <= 5, dtype=torch.float32, device=x.device)


@case
def tensor_of_a_comparison(x):
    return torch.where(torch.tensor(x.shape[1] < 6, device=x.device), x, -x)


@case
def chosen_by_min_and_max(x):
    return x * min(x.shape[1], 6) + max(x.shape[1], 5)


@case
def parity(x):
    return x * (x.shape[1] % 2)


@case
def comparison_of_a_remainder(x):
    return x * (x.shape[1] % 3 == 2)


# Numbers.


@case
def root_and_logarithm(x):
    return x * math.log(x.shape[1]) + math.sqrt(x.shape[1])


@case
def exponent(x):
    return x.abs() ** (1 / x.shape[1])


@case
def added_times_length(x, y):
    return torch.add(x, y[:, :1], alpha=x.shape[1])


@case
def multiplied_by_length(x, w, v):
    return torch.addmm(v, x[:, 0], w, alpha=x.shape[1], beta=0.5)


@case
def clamped_by_length(ids):
    return ids.clamp(max=ids.shape[1] // 2)


@case
def filled_by_length(x, keep):
    return x.masked_fill(keep[..., None], 1 / x.shape[1])


@case
def scattered_length(x, ids):
    return torch.zeros(3, 40, device=x.device).scatter(1, ids, x.shape[1] * 1.0)


@case
def padded_with_length(x):
    return F.pad(x, (0, 0, 1, 1), value=x.shape[1] * 1.0)


@case
def threshold_of_length(x):
    return F.threshold(x, 1 / x.shape[1], x.shape[1] * 1.0)


@case
def layer_norm_by_length(x):
    return F.layer_norm(x, (4,), eps=1 / x.shape[1])


@case
def smoothed_by_length(x, target):
    return F.cross_entropy(x.flatten(0, 1), target.flatten() % 4, label_smoothing=1 / x.shape[1])


@case
def ignored_by_length(x, target):
    return F.cross_entropy(x.flatten(0, 1), target.flatten() % 4, ignore_index=x.shape[1] % 4, reduction="sum")


@case
def attention_scaled_by_length(x):
    return F.scaled_dot_product_attention(x, x, x, scale=1 / x.shape[1])


@case
def attention_scaled_by_its_logarithm(x):
    return (x @ x.mT * (math.log(x.shape[1]) / 2)).softmax(-1) @ x


@case
def spaced(x):
    return x * torch.linspace(0, 1, x.shape[1], device=x.device)[:, None]


@case
def identity(square):
    return square + torch.eye(square.shape[1], device=square.device)


@case
def stepped(x):
    return x * torch.arange(0, 2 * x.shape[1], 2, device=x.device)[:, None]


@case
def variance_with_correction(x):
    return x.var(1, correction=5)


@case
def variance_of_few(x):
    return x.var(2, correction=4), x.std(2, correction=5), x[:, :2].var(1, correction=3)


@case
def variance_corrected_by_length(x):
    return x.var(2, correction=x.shape[1] // 8)


# Orders.


@case
def buckets_of_a_constant_table(x):
    return torch.bucketize(x, torch.tensor([-1.0, 0.0, 0.5], device=x.device))


@case
def buckets_of_a_padded_table(x, v):
    boundaries = x[0, :, 0].sort().values
    return torch.bucketize(v, boundaries), torch.bucketize(v * math.inf, boundaries, right=True)


@case
def buckets_of_padded_numbers(x, ids):
    numbers = (ids[0].sort().values * 2).contiguous()
    return torch.bucketize(ids, numbers), torch.bucketize(ids, numbers, right=True)


@case
def buckets_of_nan(x):
    return torch.bucketize(x / 0 * 0, x[0, :, 0].sort().values)


@case
def searched(x, v):
    rows = x.mT.sort(-1).values
    return torch.searchsorted(rows, v.detach().expand(3, 4)[..., None].contiguous())


@case
def searched_in_rows(x, y):
    return torch.searchsorted(x.mT.sort(-1).values, y.mT.contiguous(), right=True)


@case
def histogram_by_search(x):
    return torch.searchsorted(x[0, :, 0].sort().values, torch.linspace(-1, 1, 5, device=x.device))


# Positions and counts.


@case
def three_quarters(x):
    return x[:, : int(0.75 * x.shape[1])] * 2


@case
def half_rounded_up(x):
    return x[:, : math.ceil(x.shape[1] / 2)] * 2


@case
def last_third(x):
    return x[:, x.shape[1] // 3 :] * 2


@case
def middle_half(x):
    quarter = x.shape[1] // 4
    return x[:, quarter : x.shape[1] - quarter] * 2


@case
def middle_element(x):
    return x[:, x.shape[1] // 2] * 2


@case
def rest_of_a_table(x, places):
    return places[x.shape[1] :].sum(0) * x


@case
def filled_up_to_twenty(x):
    return torch.cat([x, x.new_zeros(3, 20 - x.shape[1], 4)], 1) + 1


@case
def filled_up_to_twenty_by_pad(x):
    return F.pad(x, (0, 0, 0, 20 - x.shape[1])) + 1


@case
def all_but_the_remainder(x):
    return x[:, : x.shape[1] - x.shape[1] % 4].sum(1)


@case
def last_rows_of_a_table(x, places):
    return places[-x.shape[1] :] * x


@case
def distances_to_a_table(x):
    length = x.shape[1]
    place = torch.arange(length, device=x.device)
    bias = torch.linspace(-1, 1, 63, device=x.device)
    return (x @ x.mT + bias[place[:, None] - place[None] + 31]).softmax(-1) @ x


@case
def relative_bias(x, places):
    """As Swin and T5 look it up: 2 * L - 1 distances."""
    length = x.shape[1]
    place = torch.arange(length, device=x.device)
    table = places[: 2 * length - 1, 0]
    return (x @ x.mT + table[place[:, None] - place[None] + length - 1]).softmax(-1) @ x


@case
def skewed(square):
    """Relative positions by a pad and a view (Music Transformer)."""
    length = square.shape[1]
    return F.pad(square, (1, 0)).view(3, length + 1, length)[:, 1:] * 2


# Pads and sizes.


@case
def padded_by_reflection(x):
    return F.pad(x.mT, (1, 1), mode="reflect")


@case
def padded_by_replication(x):
    return F.pad(x.mT, (2, 1), mode="replicate") * 2


@case
def padded_around(x):
    return F.pad(x.mT, (1, 1), mode="circular")


@case
def reflected_square(square):
    return F.pad(square, (1, 1, 1, 1), mode="reflect")


@case
def padded_by_half(x):
    return F.pad(x, (0, 0, 0, x.shape[1] // 2))


@case
def resized_linearly(x):
    return F.interpolate(x.mT, scale_factor=2, mode="linear")


@case
def resized_linearly_by_corners(x):
    return F.interpolate(x.mT, scale_factor=2, mode="linear", align_corners=True)


@case
def resized_to_nine(x):
    return F.interpolate(x.mT, size=9, mode="linear")


@case
def resized_to_nine_nearest(x):
    return F.interpolate(x.mT, size=9, mode="nearest") * F.interpolate(x.mT, size=9, mode="nearest-exact")


@case
def resized_bilinearly(square):
    return F.interpolate(square[:, None], scale_factor=2, mode="bilinear")


@case
def resized_bicubically(square):
    return F.interpolate(square[:, None], scale_factor=2, mode="bicubic")


@case
def resized_by_area(x):
    return F.interpolate(x.mT, size=5, mode="area")


@case
def sampled(square):
    grid = torch.linspace(-1, 1, 3 * 5 * 2, device=square.device).view(1, 3, 5, 2).expand(3, -1, -1, -1)
    return F.grid_sample(square[:, None], grid, align_corners=False)


@case
def resized_by_sampling(x, places):
    return F.interpolate(places.T[None], size=x.shape[1], mode="linear") * x.mT


@case
def shuffled(x):
    return F.channel_shuffle(x.mT, 2)


@case
def expanded_and_flat(v, x):
    return v.expand(3, x.shape[1], 4).reshape(-1, 4) * torch.arange(3 * x.shape[1], device=x.device)[:, None]


# Positions before the first.


@case
def last_five(x):
    return x[:, -5:] * 2


@case
def last_as_many_of_fewer(x):
    return (x[:, :-2] * 2)[:, -x.shape[1] :] + 1


@case
def written_last_five(x):
    y = x.clone()
    y[:, -5:] = 1.5
    return y * x


@case
def full_like_length(x):
    return x + torch.full_like(x, x.shape[1])


@case
def bucket_of_a_number(x):
    return torch.bucketize(0.1, x[0, :, 0].sort().values)


# Steps of slices, and what convolutions count in.


@case
def diagonal_by_step(x):
    return (x @ x.mT).flatten(1)[:, :: x.shape[1] + 1]


@case
def last_column_by_step(x):
    return (x @ x.mT).flatten(1)[:, x.shape[1] - 1 :: x.shape[1]].exp()


@case
def antidiagonal_by_step(x):
    return (x @ x.mT).flatten(1)[:, x.shape[1] - 1 : -1 : x.shape[1] - 1]


@case
def concatenated_by_step(x):
    return torch.cat([x, -x, x * 2], 1)[:, 1 :: x.shape[1]].sum(1)


@case
def every_second_from_the_end(x):
    return (x[:, -4::2] * 2).sum(1)


@case
def written_diagonal_by_step(x):
    scores = (x @ x.mT).flatten(1) * 1
    scores[:, :: x.shape[1] + 1] = 7
    return scores


@case
def written_every_second_from_the_end(x):
    y = x.clone()
    y[:, -3::2] = 0
    return y * x


@case
def convolved_with_half_as_padding(x, kernel):
    return F.conv1d(x.mT, kernel, padding=x.shape[1] // 2)


@case
def convolved_in_steps_of_a_length(x, kernel):
    return F.conv1d(torch.cat([x, x], 1).mT, kernel, stride=x.shape[1] // 2)


@case
def convolved_with_a_length_between(x, kernel):
    return F.conv1d(torch.cat([x, x], 1).mT, kernel[..., :2], dilation=x.shape[1] - 1)


@case
def transposed_in_steps_of_a_length(x, kernel):
    return F.conv_transpose1d(x.mT, kernel, stride=x.shape[1] // 2)
