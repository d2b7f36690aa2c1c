"""Small functions that put a merged dimension beside one of the same size whose true elements lie otherwise.

The arguments are those of `functions.py`; B * L is the merged dimension ("flat").
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

CASES: dict[str, object] = {}


def case(fn):
    """Register a function under its name."""
    CASES[fn.__name__] = fn
    return fn


def numbers(x):
    """0, 1, ...: one for each row of flat `x`, the true ones first."""
    return torch.arange(x.shape[0] * x.shape[1], device=x.device)


def flat_places(x, places):
    """A table with a row for each row of flat `x`, the true ones first."""
    return places[numbers(x) % 64]


# Losses.


@case
def loss_of_each_flat_token(x, target):
    return F.cross_entropy(x.flatten(0, 1), target.flatten() % 4, reduction="none")


@case
def weighted_loss_of_flat_tokens(x, target, keep):
    each = F.cross_entropy(x.flatten(0, 1), target.flatten() % 4, reduction="none")
    return (each * keep.flatten()).sum() / keep.sum()


@case
def loss_against_numbers(x):
    return F.cross_entropy(x.flatten(0, 1), numbers(x) % 4)


@case
def each_loss_against_numbers(x):
    return F.cross_entropy(x.flatten(0, 1), numbers(x) % 4, reduction="none")


@case
def loss_with_class_weights(x, target, v):
    return F.cross_entropy(x.flatten(0, 1), target.flatten() % 4, weight=v.detach().exp(), reduction="none")


@case
def smoothed_loss_of_numbers(x):
    return F.cross_entropy(x.flatten(0, 1), numbers(x) % 4, label_smoothing=0.1, ignore_index=2)


@case
def loss_of_soft_targets(x, places):
    return F.cross_entropy(x.flatten(0, 1), flat_places(x, places).softmax(-1))


@case
def loss_of_flat_against_a_table(x, places):
    return F.mse_loss(x.reshape(-1, 4), flat_places(x, places))


@case
def each_error_against_a_table(x, places):
    return F.smooth_l1_loss(x.reshape(-1, 4), flat_places(x, places), reduction="none")


@case
def divergence_from_a_table(x, places):
    return F.kl_div(x.reshape(-1, 4).log_softmax(-1), flat_places(x, places).softmax(-1), reduction="batchmean")


@case
def binary_loss_against_numbers(x):
    return F.binary_cross_entropy_with_logits(x.mean(-1).flatten(), (numbers(x) % 2).float(), reduction="none")


@case
def binary_loss_of_probabilities_against_numbers(x):
    return F.binary_cross_entropy(x.mean(-1).flatten().sigmoid(), (numbers(x) % 2).float())


@case
def contrast_of_tokens(x, y):
    scores = F.normalize(x.reshape(-1, 4), dim=-1) @ F.normalize(y.reshape(-1, 4), dim=-1).T
    return F.cross_entropy(scores, numbers(x))


@case
def contrast_of_tokens_picked(x, y):
    """As above where classes have no tail, by hand."""
    scores = (x.reshape(-1, 4) @ y.reshape(-1, 4).T).log_softmax(-1)
    return -scores.diagonal().mean()


@case
def cosine_loss(x, places):
    return F.cosine_embedding_loss(x.reshape(-1, 4), flat_places(x, places), (numbers(x) % 2 * 2 - 1).float())


@case
def triplet(x, y, places):
    return F.triplet_margin_loss(x.reshape(-1, 4), y.reshape(-1, 4), flat_places(x, places))


@case
def negative_likelihood_of_flat(x, target):
    return F.nll_loss(x.reshape(-1, 4).log_softmax(-1), target.reshape(-1) % 4, reduction="sum")


# Look-ups.


@case
def embedded_flat(ids, table):
    return F.embedding(ids.flatten(), table)


@case
def embedded_flat_and_numbers(ids, table, places):
    numbered = torch.arange(ids.shape[0] * ids.shape[1], device=ids.device)
    return F.embedding(ids.flatten(), table) + F.embedding(numbered, places)


@case
def embedded_flat_weighted(ids, table, places):
    return F.embedding(ids.flatten(), table) * places[torch.arange(ids.numel(), device=ids.device)]


@case
def rows_of_flat_by_number(x):
    return x.reshape(-1, 4)[numbers(x)]


@case
def rows_of_flat_backwards(x):
    return x.reshape(-1, 4)[-1 - numbers(x)]


@case
def rows_of_flat_selected(x):
    return x.reshape(-1, 4).index_select(0, numbers(x))


@case
def rows_of_numbered_by_flat(ids, places):
    numbered = places[torch.arange(ids.shape[0] * ids.shape[1], device=ids.device)]
    return numbered[ids.flatten() % 4]


@case
def rows_by_expert(x, ids):
    """As a mixture of experts sorts its tokens, and brings them back."""
    order = ids.flatten().argsort(stable=True)
    return torch.zeros_like(x.reshape(-1, 4)).index_add(0, order, x.reshape(-1, 4)[order] * 2).view_as(x)


@case
def flat_gathered_by_number(x):
    return x.flatten().gather(0, numbers(x))


@case
def flat_gathered_by_classes(x, target):
    return x.reshape(-1, 4).gather(1, (target % 4).reshape(-1, 1)).squeeze(1)


@case
def numbered_gathered_by_flat(target, places):
    numbered = places[torch.arange(target.shape[0] * target.shape[1], device=target.device)]
    return numbered.gather(1, (target % 4).reshape(-1, 1))


@case
def flat_gathered_by_numbered_classes(x):
    return torch.take_along_dim(x.reshape(-1, 4), (numbers(x) % 4)[:, None], 1)


@case
def scattered_by_number(x):
    index = numbers(x)[:, None].expand(-1, 4)
    return torch.zeros_like(x.reshape(-1, 4)).scatter(0, index, x.reshape(-1, 4) * 2)


@case
def scattered_into_classes(x):
    return torch.zeros_like(x.reshape(-1, 4)).scatter(1, (numbers(x) % 4)[:, None], 1.0) * x.reshape(-1, 4)


@case
def scatter_added_by_number(x):
    index = numbers(x)[:, None].expand(-1, 4)
    return torch.ones_like(x.reshape(-1, 4)).scatter_add(0, index, x.reshape(-1, 4))


@case
def scattered_from_flat_to_few(x):
    index = (numbers(x) % 5)[:, None].expand(-1, 4)
    return torch.zeros(5, 4, device=x.device).scatter_add(0, index, x.reshape(-1, 4))


@case
def scatter_reduced(x):
    index = (numbers(x) % 5)[:, None].expand(-1, 4)
    return torch.zeros(5, 4, device=x.device).scatter_reduce(0, index, x.reshape(-1, 4), "amax")


@case
def added_by_number(x):
    return torch.ones_like(x.reshape(-1, 4)).index_add(0, numbers(x), x.reshape(-1, 4))


@case
def segment_sums(x):
    return torch.zeros(5, 4, device=x.device).index_add(0, numbers(x) % 5, x.reshape(-1, 4))


@case
def segment_means(x, ids):
    flat, segments = x.reshape(-1, 4), ids.flatten()
    sums = torch.zeros(10, 4, device=x.device).index_add(0, segments, flat)
    counts = torch.zeros(10, device=x.device).index_add(0, segments, torch.ones_like(flat[:, 0]))
    return sums / counts.clamp(min=1)[:, None]


@case
def put_by_number(x):
    return torch.zeros_like(x.reshape(-1, 4)).index_put((numbers(x),), x.reshape(-1, 4) * 2, accumulate=True)


@case
def put_from_flat_into_few(x):
    return torch.zeros(5, 4, device=x.device).index_put((numbers(x) % 5,), x.reshape(-1, 4), accumulate=True)


@case
def put_over_all(x, places):
    y = flat_places(x, places)
    return y.index_put((numbers(x) * 0,), x.reshape(-1, 4), accumulate=True)


@case
def one_hot_of_numbers(x):
    return F.one_hot(numbers(x) % 4, 4) * x.reshape(-1, 4)


@case
def bag_of_flat(ids, table):
    return F.embedding(ids.flatten(), table, padding_idx=3).view(3, -1, 4).mean(1)


# Writes.


@case
def written_over_all(x):
    y = torch.zeros(x.shape[0] * x.shape[1], 4, device=x.device)
    y[:] = x.reshape(-1, 4)
    return y


@case
def copied_over_all(x, places):
    y = flat_places(x, places).clone()
    y.copy_(x.reshape(-1, 4))
    return y * 2


@case
def numbered_written_over_flat(x, places):
    y = x.reshape(-1, 4).clone()
    y[:] = flat_places(x, places)
    return y + x.reshape(-1, 4)


@case
def written_behind_the_first(x, places):
    y = flat_places(x, places).clone()
    y[1:] = x.reshape(-1, 4)[:-1]
    return y


@case
def column_written(x, places):
    y = flat_places(x, places).clone()
    y[:, 0] = x.reshape(-1, 4)[:, 1]
    return y


@case
def columns_written(x, places):
    y = flat_places(x, places).clone()
    y[:, 1:3] = x.reshape(-1, 4)[:, :2]
    return y


@case
def flat_column_written(x):
    y = x.reshape(-1, 4).clone()
    y[:, 0] = numbers(x).float()
    return y


@case
def filled_by_flat_mask(x, keep, places):
    return flat_places(x, places).masked_fill(keep.flatten()[:, None], 0.0)


@case
def chosen_by_flat_mask(x, keep, places):
    return torch.where(keep.flatten()[:, None], x.reshape(-1, 4), flat_places(x, places))


# Pieces.


@case
def flat_rolled(x):
    return x.reshape(-1, 4).roll(1, 0)


@case
def flat_rolled_elements(x):
    return x.roll(3)


@case
def flat_flipped(x):
    return x.reshape(-1, 4).flip(0)


@case
def flat_and_numbered_joined(x, places):
    return torch.cat([x.reshape(-1, 4), flat_places(x, places)], 1)


@case
def flat_and_numbered_in_a_row(x, places):
    return torch.cat([flat_places(x, places), x.reshape(-1, 4)], 0)


@case
def flat_and_numbered_stacked(x, places):
    return torch.stack([flat_places(x, places), x.reshape(-1, 4)], 1)


@case
def flat_split(x):
    left, right = x.reshape(-1, 4).split([3, x.shape[0] * x.shape[1] - 3])
    return left * 3, right * 2


@case
def flat_shifted(x):
    flat = x.reshape(-1, 4)
    return flat[1:] - flat[:-1]


@case
def flat_every_third(x):
    return x.reshape(-1, 4)[::3] * 2


@case
def flat_last(x):
    return x.reshape(-1, 4)[-1] * 2


@case
def flat_padded(x, places):
    return F.pad(x.reshape(-1, 4), (0, 0, 1, 1))[1:-1] * flat_places(x, places)


@case
def flat_windows(x):
    return x.reshape(-1, 4).unfold(0, 2, 2).sum(-1)


@case
def flat_diagonal(x, y):
    return (x.reshape(-1, 4) @ y.reshape(-1, 4).T).diagonal()


@case
def diagonal_against_numbers(x, places):
    return (x.reshape(-1, 4) @ flat_places(x, places).T).diagonal() * numbers(x)


@case
def triangle_of_flat(x, y):
    return (x.reshape(-1, 4) @ y.reshape(-1, 4).T).tril()


@case
def triangle_by_numbers(x, y):
    place = numbers(x)
    return (x.reshape(-1, 4) @ y.reshape(-1, 4).T).masked_fill(place[None] > place[:, None], float("-inf")).softmax(-1)


@case
def causal_over_all_tokens(x):
    flat = x.reshape(1, -1, 4)
    return F.scaled_dot_product_attention(flat, flat, flat, is_causal=True)


@case
def attention_among_all_tokens(x, keep):
    flat = x.reshape(1, -1, 4)
    return F.scaled_dot_product_attention(flat, flat, flat, attn_mask=keep.reshape(1, 1, -1)).view_as(x)


@case
def attention_of_flat_to_a_table(x, places):
    table = flat_places(x, places)[None]
    return F.scaled_dot_product_attention(x.reshape(1, -1, 4), table, table)


@case
def flat_repeated(x):
    return x.reshape(-1, 4).repeat(2, 1)


@case
def flat_interleaved(x):
    return x.reshape(-1, 4).repeat_interleave(2, 0)


# Order and running sums.


@case
def flat_running_sum(x):
    return x.reshape(-1, 4).cumsum(0)


@case
def flat_running_sum_by_number(x):
    return x.flatten(0, 1).cumsum(0) / (numbers(x)[:, None] + 1)


@case
def flat_sorted(x):
    return x.flatten().sort().values


@case
def flat_sorted_rows(x, places):
    return x.reshape(-1, 4).sort(0).values * flat_places(x, places)


@case
def flat_order(x):
    return x.flatten().argsort()


@case
def flat_top(x):
    return x.flatten().topk(3)


@case
def flat_top_of_rows(x, places):
    values, index = x.reshape(-1, 4).topk(2, 1)
    return values * flat_places(x, places)[:, :2], index


@case
def flat_largest_place(x):
    return x.mean(-1).flatten().argmax()


@case
def flat_nonzero_count(keep):
    return keep.flatten().cumsum(0) * keep.flatten()


# Matmuls.


@case
def added_to_flat(x, w, places):
    return torch.addmm(flat_places(x, places), x.reshape(-1, 4), w)


@case
def flat_added_to_numbered(x, w, places):
    return torch.addmm(x.reshape(-1, 4), flat_places(x, places), w, beta=0.5, alpha=2)


@case
def added_to_batches(x, places):
    rows = flat_places(x, places).view(1, -1, 4).expand(2, -1, -1)
    flat = x.reshape(1, -1, 4).expand(2, -1, -1)
    return torch.baddbmm(rows, flat, x.new_ones(2, 4, 4))


@case
def products_of_flat_and_numbered(x, places):
    return x.reshape(-1, 4).T @ flat_places(x, places)


@case
def flat_times_numbers(x):
    return x.reshape(-1, 4).T.mv(numbers(x).float())


@case
def flat_summed_by_einsum(x, places):
    return torch.einsum("nd,ne->de", x.reshape(-1, 4), flat_places(x, places))


@case
def outer_product_of_flat(x):
    return torch.outer(x.mean(-1).flatten(), numbers(x).float())


@case
def distances_of_flat(x, places):
    return torch.cdist(x.reshape(-1, 4), flat_places(x, places)).mean(0)


@case
def distances_of_batches(x, places):
    """[B * L, 1, D] and [B * L, 2, D]: the batches lie otherwise."""
    return torch.cdist(x.reshape(-1, 1, 4), flat_places(x, places)[:, None].expand(-1, 2, -1))


@case
def batches_of_flat_and_numbered(x, places):
    return torch.bmm(x.reshape(-1, 1, 4), flat_places(x, places)[:, :, None])


@case
def gram_of_width(x):
    """The features are merged as well: [B, L * D]."""
    return x.reshape(3, -1) @ torch.arange(x.shape[1] * 4, device=x.device).float() / 100


@case
def features_by_table(x):
    """[B, D * L] by [D * L]."""
    return x.mT.reshape(3, -1) * torch.arange(x.shape[1] * 4, device=x.device)


@case
def cosine_of_flat(x, places):
    return F.cosine_similarity(x.reshape(-1, 4), flat_places(x, places), dim=-1)


@case
def cosine_over_flat(x, places):
    return F.cosine_similarity(x.reshape(-1, 4), flat_places(x, places), dim=0)


# Norms, convolutions, pools.


@case
def layer_norm_of_flat(x, v, places):
    return F.layer_norm(x.reshape(-1, 4), (4,), v) * flat_places(x, places)


@case
def layer_norm_of_numbered(x, v, places):
    return F.layer_norm(flat_places(x, places), (4,), v) * x.reshape(-1, 4)


@case
def batch_norm_of_flat(x, v, places):
    return F.batch_norm(x.reshape(-1, 4), None, None, v, v, training=True) * flat_places(x, places)


@case
def convolution_over_flat(x, kernel):
    return F.conv1d(x.reshape(1, -1, 4).mT, kernel, padding=1)


@case
def convolution_of_flat_batch(x, kernel, places):
    """[B * L, D, 3]."""
    return F.conv1d(torch.stack([x.reshape(-1, 4), flat_places(x, places), x.reshape(-1, 4)], 2), kernel)


@case
def convolution_against_numbered(x, kernel, places):
    return F.conv1d(x.reshape(1, -1, 4).mT, kernel, padding=1) * flat_places(x, places).T


@case
def pool_over_flat(x, places):
    return F.max_pool1d(x.reshape(1, -1, 4).mT, 2, 1) * flat_places(x, places).T[:, 1:]


@case
def mean_pool_over_flat(x, places):
    return F.avg_pool1d(x.reshape(1, -1, 4).mT, 3, 1, 1) * flat_places(x, places).T


@case
def flat_masked_mean(x, keep):
    weight = keep.flatten()[:, None].float()
    return (x.reshape(-1, 4) * weight).sum(0) / weight.sum()


@case
def flat_normalised(x, places):
    return F.normalize(x.reshape(-1, 4), dim=0) * flat_places(x, places)


@case
def flat_softmax_by_number(x, places):
    return x.reshape(-1, 4).softmax(0) * flat_places(x, places)


@case
def flat_standardised(x, places):
    flat = x.reshape(-1, 4)
    return (flat - flat.mean(0)) / (flat.std(0) + 1) + flat_places(x, places)


@case
def flat_log_sum(x, places):
    return (x.reshape(-1, 4) + flat_places(x, places)).logsumexp(0)


@case
def two_ways_to_flatten(x):
    """[B, D, L] and [B, L, D] flat: three atoms, in two orders."""
    return x.mT.reshape(-1) * x.reshape(-1)


@case
def square_both_ways(square):
    """[B, L * L] of both orders, and a number for each."""
    both = square.mT.reshape(3, -1) + square.reshape(3, -1)
    return both * torch.arange(square.shape[1] * square.shape[2], device=square.device)


@case
def length_first(x, places):
    """[L * B, D]: the true rows come first, as they do in the table."""
    return x.transpose(0, 1).reshape(-1, 4) * flat_places(x, places)


@case
def length_first_and_last(x):
    return x.transpose(0, 1).reshape(-1, 4) * x.reshape(-1, 4)
