"""Small functions that mix along a padded dimension in every way we could think of.

Arguments go by name. Legend: B = 3, L the length that varies, D = 4.

    x, y    f32[B, L, D]      ids, target  i64[B, L], below 10     keep    bool[B, L], the first is true
    w       f32[D, D]         v            f32[D]                  table   f32[10, D]
    places  f32[64, D]        kernel       f32[D, D, 3]            square  f32[B, L, L]
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

QUICK: dict[str, object] = {}
SLOW: dict[str, object] = {}


def case(fn, *, quick=False):
    """Register a function under its name."""
    (QUICK if quick else SLOW)[fn.__name__] = fn
    return fn


def quick(fn):
    return case(fn, quick=True)


# Elements alone.


@case
def scaled(x, w):
    return torch.tanh(x @ w) * 2 + 1


@case
def masked_by_hand(x, keep):
    return torch.where(keep.unsqueeze(-1), x, 0.0)


@case
def one_divided(x):
    return 1 / (x * x + 0.5)


@case
def outer_sum(x):
    return x.unsqueeze(1) + x.unsqueeze(2)


@case
def clamped(x):
    return x.clamp(-0.5, 0.5).exp()


# Reductions.


@quick
def mean_over_length(x):
    return x.mean(1)


@case
def sum_over_all(x):
    return (x * x).sum()


@quick
def masked_mean(x, keep):
    weight = keep.to(x.dtype).unsqueeze(-1)
    return (x * weight).sum(1) / weight.sum(1)


@case
def mean_of_all(x):
    return x.mean()


@case
def mean_over_merged(x):
    return x.reshape(-1, 4).mean(0)


@quick
def variance(x):
    return x.var(1)


@case
def biased_variance(x):
    return x.var(1, unbiased=False, keepdim=True) + x


@case
def deviation(x):
    return x.std(1, correction=0)


@case
def var_and_mean(x):
    variance, mean = torch.var_mean(x, (0, 1))
    return variance + mean


@quick
def maximum(x):
    return x.amax(1) - x.amin(1)


@case
def maximum_with_place(x):
    value, place = x.max(1)
    return value, place


@case
def minimum_with_place(x):
    value, place = (x - 3).min(1)
    return value, place


@quick
def first_largest(x):
    return (x - 5).argmax(1)


@case
def smallest_place_kept(x):
    return (x + 5).argmin(1, keepdim=True)


@case
def flat_argmax(x):
    return x.argmax()


@case
def product_over_length(x):
    return (x * 0.1 + 1).prod(1)


@case
def any_kept(keep):
    return (~keep).any(1), keep.all(1)


@case
def log_sum_exp(x):
    return x.logsumexp(1)


@case
def norm_over_length(x):
    return x.norm(dim=1) + 1


@case
def infinite_norm(x):
    return torch.linalg.vector_norm(x, float("inf"), 1)


@case
def count_kept(keep):
    return keep.sum(1), torch.count_nonzero(keep, 1)


@case
def median(x):
    return x.median(1).values


@case
def integers_largest(ids):
    return ids.amax(1), ids.amin(1), ids.sum(1)


@case
def normalised(x):
    return F.normalize(x, dim=1)


@case
def centred(x):
    return x - x.mean(1, keepdim=True)


@case
def standardised(x):
    return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1)


# Softmax and attention.


@quick
def softmax_over_length(x):
    return x.softmax(1)


@case
def log_softmax_over_length(x):
    return x.log_softmax(1)


@quick
def attention(x, y):
    return F.scaled_dot_product_attention(x, y, y)


@case
def causal_attention(x, w):
    return F.scaled_dot_product_attention(x @ w, x, x, is_causal=True)


@case
def attention_with_mask(x, keep):
    return F.scaled_dot_product_attention(x, x, x, attn_mask=keep.unsqueeze(1))


@case
def attention_by_hand(x, w):
    scores = (x @ w) @ x.transpose(1, 2) / 2
    causal = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device), 1)
    return scores.masked_fill(causal, float("-inf")).softmax(-1) @ x


@case
def attention_with_bias(x, keep):
    bias = (1.0 - keep.float()).unsqueeze(1) * -1e9
    return ((x @ x.mT) + bias).softmax(-1) @ x


@case
def attention_of_heads(x, w):
    q, k, v = ((x @ w).unflatten(-1, (2, 2)).transpose(1, 2) for _ in range(3))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@quick
def attention_of_shared_heads(x, w):
    q, k, v = ((x @ w).unflatten(-1, (2, 2)).transpose(1, 2) for _ in range(3))
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, 1:], enable_gqa=True).transpose(1, 2).flatten(2)


@case
def causal_attention_of_shared_heads(x, w):
    k = (x @ w).sin()[:, None]
    q = x[:, None] * torch.arange(1.0, 5.0, device=x.device).view(1, 4, 1, 1)
    return F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True).sum(1)


@case
def alibi(x):
    place = torch.arange(x.shape[1], device=x.device)
    bias = -(place[None, :] - place[:, None]).abs().float()
    return ((x @ x.mT) + bias).softmax(-1) @ x


@case
def sliding_window(x):
    place = torch.arange(x.shape[1], device=x.device)
    far = (place[None, :] - place[:, None]).abs() > 2
    return (x @ x.mT).masked_fill(far, float("-inf")).softmax(-1) @ x


@case
def attention_over_one_query(x, v):
    return F.scaled_dot_product_attention(v.expand(3, 1, 4), x, x)


@case
def linear_attention(x):
    state = x.softmax(1).mT @ x
    return x.softmax(2) @ state


@case
def softmax_over_merged(x):
    return x.reshape(-1).softmax(0).reshape(x.shape)


# Products.


@quick
def gram_over_length(x):
    return x.mT @ x


@quick
def projected_by_length(x, y):
    return torch.einsum("bld,ble->de", x, y)


@case
def product_of_square(square, x):
    return square @ x


@case
def dot_of_all(x, y):
    return x.reshape(-1).dot(y.reshape(-1))


@case
def linear_with_bias(x, w, v):
    return F.linear(x, w, v).relu()


@case
def bilinear(x, w):
    return torch.einsum("bld,de,bme->blm", x, w, x)


# The end, and pieces.


@quick
def last_element(x):
    return (x * x)[:, -1]


@case
def last_but_one(x):
    return x[:, -2] * 2


@quick
def last_two(x):
    return (x * x)[:, -2:]


@case
def all_but_last(x):
    return x[:, :-1].sum(1)


@quick
def shifted_difference(x):
    return x[:, 1:] - x[:, :-1]


@case
def every_second(x):
    return x[:, ::2].sum(1)


@quick
def last_as_many(x, y):
    return torch.cat([y, x], 1)[:, -y.shape[1] :] * 2


@case
def all_of_them_from_the_end(x):
    return (x * 2)[:, -x.shape[1] :].sum(1)


@case
def first_two(x):
    return x[:, :2]


@case
def without_first(x):
    return x[:, 1:].mean(1)


@case
def gathered_last_kept(x, keep):
    last = keep.sum(1) - 1
    return x[torch.arange(3, device=x.device), last]


@case
def gathered_by_ids(x, ids):
    return x.gather(1, (ids % 2).unsqueeze(-1).expand(-1, -1, 4))


@case
def negative_index(x, ids):
    return x[:, [-1, 0]]


@quick
def with_end_token(x, v):
    return torch.cat([x, v.expand(3, 1, 4)], 1)


@quick
def with_begin_token(x, v):
    return torch.cat([v.expand(3, 1, 4), x], 1).mean(1)


@case
def joined(x, y):
    return torch.cat([x, y], 1).softmax(1)


@case
def joined_features(x, y):
    return torch.cat([x, y], 2).sum(1)


@case
def rolled(x):
    return x.roll(1, 1)


@case
def rolled_in_batch(x):
    return x.roll(1, 0) * x


@quick
def flipped(x):
    return x.flip(1)


@case
def flipped_sum(x):
    return x.flip(1).cumsum(1)


@case
def halves(x):
    left, right = x.split([x.shape[1] // 2, x.shape[1] - x.shape[1] // 2], 1)
    return left.sum(1) - right.mean(1)


@case
def padded_right(x):
    return F.pad(x, (0, 0, 0, 2), value=1.5).sum(1)


@case
def padded_left(x):
    return F.pad(x, (0, 0, 2, 0)).cumsum(1)


@case
def shifted_right(ids):
    start = torch.zeros_like(ids[:, :1])
    return torch.cat([start, ids[:, :-1]], 1)


@case
def stacked(x, y):
    return torch.stack([x, y], 1).amax((1, 2))


@case
def repeated(x):
    return x.repeat(1, 2, 1).mean(1)


@case
def interleaved(x):
    return x.repeat_interleave(2, 1)


@case
def unbound(x):
    first, *_ = x.unbind(0)
    return first * 2


@case
def windows(x):
    return x.unfold(1, 2, 1).sum(-1)


@case
def written_at_end(x, v):
    y = x.clone()
    y[:, -1] = v
    return y.sum(1)


@case
def written_slice(x):
    y = x.clone()
    y[:, 1:] = x[:, :-1] * 2
    return y


@case
def written_first(x):
    y = x.clone()
    y[:, :2] = 0
    return y.mean(1)


@case
def diagonal(square):
    return square.diagonal(dim1=1, dim2=2).sum(1)


@case
def trace(square):
    return torch.einsum("bll->b", square)


@case
def upper_triangle(square):
    return square.triu(1).sum((1, 2))


# Running sums and order.


@quick
def cumulative_sum(x):
    return x.cumsum(1)


@case
def cumulative_maximum(x):
    return x.cummax(1).values


@case
def cumulative_product(x):
    return (x * 0.1 + 1).cumprod(1)


@case
def positions_from_mask(keep):
    return (keep.long().cumsum(1) - 1).clamp(min=0)


@case
def sorted_values(x):
    return x.sort(1).values


@case
def top_two(x):
    return x.topk(2, 1).values


@case
def ranks(x):
    return x.argsort(1)


@case
def sorted_downwards(x):
    return x.sort(1, descending=True)


@case
def stable_ranks(ids):
    """Equal ones keep their order, and the largest number of all is among them."""
    return torch.where(ids > 5, torch.iinfo(torch.int64).max, ids).sort(dim=1, stable=True)


@case
def order_with_nans(x):
    return x.detach().log().sort(dim=1, stable=True)


@case
def smallest_two(x):
    return x.topk(2, 1, largest=False)


@case
def second_smallest(x):
    return x.kthvalue(2, 1, keepdim=True).values


@case
def middle_id(ids):
    return ids.median(1).values


@case
def middle_of_all(x):
    return x.median()


@case
def middle_where_nans_are(x):
    return x.detach().log().median(1).values + (x.detach() + 9).log().median(1).values


@case
def largest_over_merged(x):
    return x.flatten(0, 1).max(0)


@case
def written_by_order(x):
    return torch.zeros_like(x).scatter(1, x.argsort(1), x * 2)


@case
def marked_ids(ids):
    return torch.zeros(3, 10, device=ids.device).scatter(1, ids, 1.0)


# Look-ups.


@quick
def embedded(ids, table):
    return F.embedding(ids, table)


@case
def embedded_with_padding(ids, table):
    return F.embedding(ids, table, padding_idx=3).sum(1)


@quick
def with_positions(x, places):
    return x + places[: x.shape[1]]


@case
def with_position_embedding(ids, table, places):
    return F.embedding(ids, table) + F.embedding(torch.arange(ids.shape[1], device=ids.device), places)


@case
def picked(x, target):
    return x.gather(2, (target % 4).unsqueeze(-1)).squeeze(-1)


@case
def counted(ids):
    return F.one_hot(ids, 10).sum(1)


@case
def scattered(x, ids):
    return torch.zeros(3, 10, 4, device=x.device).scatter_add(1, ids.unsqueeze(-1).expand(-1, -1, 4), x)


@case
def index_added(x, ids):
    return torch.zeros(10, 4, device=x.device).index_add(0, ids[0], x[0])


@case
def put_accumulated(x, ids):
    return torch.zeros(10, 4, device=x.device).index_put((ids,), x, accumulate=True)


@case
def bincount_by_scatter(ids):
    return torch.zeros(3, 10, dtype=torch.long, device=ids.device).scatter_add(1, ids, torch.ones_like(ids))


# Losses.


@quick
def cross_entropy(x, target):
    return F.cross_entropy(x.flatten(0, 1), target.flatten() % 4)


@case
def cross_entropy_of_classes_first(x, target):
    return F.cross_entropy(x.transpose(1, 2), target % 4)


@case
def cross_entropy_ignoring(x, target):
    return F.cross_entropy(x.flatten(0, 1), target.flatten() % 4, ignore_index=2)


@case
def cross_entropy_smoothed(x, target):
    return F.cross_entropy(x.flatten(0, 1), target.flatten() % 4, label_smoothing=0.1)


@case
def cross_entropy_each(x, target):
    return F.cross_entropy(x.transpose(1, 2), target % 4, reduction="none")


@quick
def next_token_loss(x, target):
    return F.cross_entropy(x[:, :-1].reshape(-1, 4), target[:, 1:].reshape(-1) % 4)


@quick
def squared_error(x, y):
    return F.mse_loss(x, y)


@case
def absolute_error(x, y):
    return F.l1_loss(x, y)


@case
def smooth_error(x, y):
    return F.smooth_l1_loss(x, y)


@case
def huber(x, y):
    return F.huber_loss(x, y, delta=0.5)


@case
def binary_loss(x, keep):
    return F.binary_cross_entropy_with_logits(x.mean(-1), keep.float())


@case
def binary_loss_of_probabilities(x, keep):
    return F.binary_cross_entropy(x.mean(-1).sigmoid(), keep.float())


@case
def divergence(x, y):
    return F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean")


@case
def divergence_by_mean(x, y):
    return F.kl_div(x.log_softmax(-1), y.softmax(-1))


@case
def cosine(x, y):
    return F.cosine_similarity(x, y, dim=1)


@case
def contrastive(x, y):
    scores = x.mean(1) @ y.mean(1).T
    return F.cross_entropy(scores, torch.arange(3, device=x.device))


# Norms.


@quick
def layer_norm(x, v):
    return F.layer_norm(x, (4,), v)


@case
def rms_norm(x, v):
    return F.rms_norm(x, (4,), v)


@quick
def layer_norm_over_length(x):
    return F.layer_norm(x.mT, (x.shape[1],))


@case
def group_norm(x):
    return F.group_norm(x.mT, 2)


@quick
def batch_norm(x, v):
    return F.batch_norm(x.mT, None, None, v, v, training=True)


@case
def instance_norm(x):
    return F.instance_norm(x.mT)


# Convolutions and pools.


@quick
def convolution(x, kernel):
    return F.conv1d(x.mT, kernel, padding=1)


@case
def strided_convolution(x, kernel):
    return F.conv1d(x.mT, kernel, padding=1, stride=2)


@case
def causal_convolution(x, kernel):
    return F.conv1d(F.pad(x.mT, (2, 0)), kernel).relu()


@case
def depthwise_convolution(x, kernel):
    return F.conv1d(x.mT, kernel[:, :1], padding=1, groups=4).sum(2)


@case
def transposed_convolution(x, kernel):
    return F.conv_transpose1d(x.mT, kernel, padding=1)


@case
def max_pool(x):
    return F.max_pool1d(x.mT, 2)


@case
def padded_max_pool(x):
    return F.max_pool1d(x.mT, 2, stride=1, padding=1)


@case
def average_pool(x):
    return F.avg_pool1d(x.mT, 2)


@case
def padded_average_pool(x):
    return F.avg_pool1d(x.mT, 3, stride=1, padding=1)


@case
def average_pool_of_what_is_there(x):
    return F.avg_pool1d(x.mT, 3, stride=1, padding=1, count_include_pad=False)


@case
def sum_pool_in_two_dimensions(square):
    return F.avg_pool2d(square.unsqueeze(1), (2, 1), stride=1, divisor_override=1)


@case
def adaptive_pool(x):
    return F.adaptive_avg_pool1d(x.mT, 1)


@case
def adaptive_max_pool(x):
    return F.adaptive_max_pool1d(x.mT, 1)


@case
def interpolated(x):
    return F.interpolate(x.mT, scale_factor=2, mode="nearest")


# The length as a value, and merged dimensions.


@quick
def length_as_a_value(x):
    return x.sum(1) / x.shape[1]


@case
def scaled_by_root_of_length(x):
    return x * x.shape[1] ** -0.5


@case
def filled_with_length(x):
    return torch.full((3,), x.shape[1], device=x.device, dtype=x.dtype) + x.sum((1, 2))


@case
def positions_from_the_end(x):
    place = torch.arange(x.shape[1] - 1, -1, -1, device=x.device)
    return x * place[:, None]


@case
def relative_positions(x):
    place = torch.arange(x.shape[1], device=x.device) / x.shape[1]
    return (x * place[:, None]).sum(1)


@quick
def merged_result(x, w):
    return (x @ w).reshape(-1, 4)


@case
def flat_result(x):
    return (x + 1).flatten(1)


@case
def transposed_flat_result(x):
    return x.mT.reshape(3, -1)


@case
def merged_and_split(x):
    return x.reshape(-1, 4).reshape(3, -1, 4).softmax(1)


@case
def length_split_in_pairs(x):
    even = x[:, : x.shape[1] // 2 * 2]
    return even.reshape(3, -1, 2, 4).mean(2)


@case
def rotary(x):
    angle = torch.arange(x.shape[1], device=x.device)[:, None] * torch.tensor([1.0, 0.1], device=x.device)
    left, right = x.chunk(2, -1)
    return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], -1)


@case
def spectrum(x):
    return torch.fft.rfft(x, dim=1).abs().sum(1)


@case
def unique_pairs(x):
    return torch.cdist(x, x).sum((1, 2))


@case
def branch_by_length(x):
    return x.sum(1) if x.shape[1] > 6 else x.mean(1)


@case
def recurrence(x, w):
    state = x[:, 0] @ w
    return torch.tanh(state) + x.sum(1)


@case
def repeated_by_the_length(x):
    return x[:, 0].repeat(1, x.shape[1]).view(3, -1, 4) * x


@case
def repeated_rows_by_the_length(x):
    return x.repeat(1, x.shape[1], 1).softmax(1).square().sum(1)


@quick
def group_norm_of_channels(x, v):
    return F.group_norm(x.transpose(0, 1), 3, torch.ones(3, device=x.device) * v[0], torch.ones(3, device=x.device))


@case
def group_norm_of_rows(x, w):
    return F.group_norm(x.flatten(0, 1), 2, w[0], w[1]).view(x.shape).sum(1)


@quick
def lists_of_tensors(x, y):
    z, w = torch._foreach_mul([x, y], 0.9)
    z, w = torch._foreach_addcdiv([z, w], [x, y], [x.square() + 1, y.square() + 1], 0.5)
    z, w = torch._foreach_add([z, w], [y, x], alpha=2)
    return torch.stack([*torch._foreach_norm([z, w]), *(t.sum() for t in torch._foreach_maximum([z, w], 0.1))])


@case
def lists_of_tensors_by_lists(x, y):
    z, w = torch._foreach_addcmul([x, y], [x, y], [y, x], [0.5, 0.25])
    z, w = torch._foreach_lerp([z, w], [y, x], 0.3)
    z, w = torch._foreach_pow(torch._foreach_abs([z, w]), [2.0, 3.0])
    z, w = torch._foreach_minimum(torch._foreach_sqrt([z, w]), [x, y])
    return torch.stack(torch._foreach_norm([z, w], 1)) + torch.stack([t.mean() for t in torch._foreach_neg([z, w])])


@case
def nanmedian(x):
    some = x.detach().log()
    return some.nanmedian(1).values + (x.detach() + 9).log().nanmedian(1).values, (x + 0 * some.nan_to_num()).nanmedian(
        1
    )


@case
def nanmedian_of_all(x):
    return x.nanmedian() + x.detach().log().nanmedian()


@case
def nanmedian_of_nothing(x):
    return (x.detach() * float("nan")).nanmedian(1).values
