"""Speech, images, diffusion, graphs and recommendations."""

from __future__ import annotations

from functools import partial

import diffusers
import torch
import transformers
from torch import nn

from tests.zoo.zoo_model import B, Inputs, ZooModel, pixels


def _wav2vec2() -> nn.Module:
    config = transformers.Wav2Vec2Config(
        vocab_size=32, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        conv_dim=(32, 32, 32), conv_kernel=(10, 3, 2), conv_stride=(5, 2, 2), num_feat_extract_layers=3,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, apply_spec_augment=False, layerdrop=0.0,
        hidden_dropout=0.0, activation_dropout=0.0, attention_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
    )  # fmt: skip
    model = transformers.Wav2Vec2ForCTC(config)
    # In training it asks for the gradient of its input by assigning to `requires_grad`; ours asks already.
    model.wav2vec2.feature_extractor._requires_grad = False
    return model


def _wav2vec2_inputs() -> Inputs:
    return {
        "input_values": torch.randn(B, 480),
        "attention_mask": (torch.arange(480) < torch.tensor([[480], [320]])).long(),
    }


def _sam() -> nn.Module:
    vision = dict(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=64, patch_size=8, window_size=3,
        global_attn_indexes=[1], output_channels=32, mlp_dim=128, num_pos_feats=16,
        initializer_range=0.02,  # the default of 1e-10 leaves gradients that float32 does not hold
    )  # fmt: skip
    prompt = dict(hidden_size=32, image_size=64, patch_size=8, image_embedding_size=8)
    mask = dict(hidden_size=32, mlp_dim=64, num_attention_heads=4, iou_head_hidden_dim=32)
    config = transformers.SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=mask)
    return transformers.SamModel(config)


def _sam_inputs() -> Inputs:
    points = 64 * torch.rand(B, 1, 2, 2)
    return {**pixels(64), "input_points": points, "input_labels": torch.tensor([[[1, 0]], [[1, 1]]])}


def _detr() -> nn.Module:
    config = transformers.DetrConfig(
        use_pretrained_backbone=False, backbone="resnet18", d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
        num_queries=6, num_labels=5, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip
    return transformers.DetrForObjectDetection(config)


def _detr_inputs() -> Inputs:
    mask = torch.ones(B, 64, 64, dtype=torch.long)
    mask[1, :, 40:] = 0
    return {**pixels(64), "pixel_mask": mask}


def _unet() -> nn.Module:
    return diffusers.UNet2DConditionModel(
        sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32, attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip


def _unet_inputs() -> Inputs:
    return {
        "sample": torch.randn(B, 4, 16, 16),
        "timestep": torch.tensor([3, 700]),
        "encoder_hidden_states": torch.randn(B, 7, 32),
    }


def _dit() -> nn.Module:
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=100,
    )  # fmt: skip
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder.dropout_prob = 0.0  # it forgets labels at random
    return model


def _dit_inputs() -> Inputs:
    labels = torch.tensor([7, 81])
    return {"hidden_states": torch.randn(B, 4, 8, 8), "timestep": torch.tensor([3, 700]), "class_labels": labels}


def _vae() -> nn.Module:
    return diffusers.AutoencoderKL(
        block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2, layers_per_block=1,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=8, sample_size=32,
    )  # fmt: skip


class _GraphNetwork(nn.Module):
    """Two rounds of messages along edges, each node adding up and averaging what arrives by `index_add`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 64)
        self.messages = nn.ModuleList(nn.Linear(128, 64) for _ in range(2))
        self.updates = nn.ModuleList(nn.Linear(128, 64) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(2))
        self.head = nn.Linear(64, 5)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Nodes [N, 16], edges [2, E] (from, to), the graph of each node [N] -> [N, 5], [graphs, 64]."""
        source, target = edges
        hidden = self.embed(nodes)
        degree = hidden.new_zeros(len(hidden)).index_add(0, target, hidden.new_ones(len(target))).clamp(min=1)
        for message, update, norm in zip(self.messages, self.updates, self.norms, strict=True):
            sent = torch.nn.functional.silu(message(torch.cat((hidden[source], hidden[target]), -1)))
            arrived = torch.zeros_like(hidden).index_add_(0, target, sent.to(hidden.dtype)) / degree[:, None]
            hidden = norm(hidden + update(torch.cat((hidden, arrived), -1)))
        pooled = hidden.new_zeros(B, 64).index_add(0, graph, hidden)
        return self.head(hidden), pooled


def _graph_inputs() -> Inputs:
    edges = torch.randint(0, 10, (2, 40)) + 10 * torch.arange(2).repeat_interleave(20)
    return {"nodes": torch.randn(20, 16), "edges": edges, "graph": torch.arange(B).repeat_interleave(10)}


class _Recommender(nn.Module):
    """Bags of categories beside dense features, their pairwise products, and an MLP (DLRM)."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 32, mode=mode) for mode in ("sum", "mean", "max"))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.SiLU(), nn.Linear(64, 32))
        self.top = nn.Sequential(nn.Linear(32 + 6, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, dense: torch.Tensor, items: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Dense features [B, 13], categories of each bag [3, L] with where each example begins [3, B] -> [B]."""
        bottom = self.bottom(dense)
        parts = [bottom, *(bag(i, o) for bag, i, o in zip(self.bags, items, offsets, strict=True))]
        every = torch.stack([part.to(bottom.dtype) for part in parts], 1)
        rows, columns = torch.triu_indices(4, 4, 1)
        pairs = torch.bmm(every, every.mT)[:, rows, columns]
        return self.top(torch.cat((bottom, pairs), 1)).squeeze(1)


def _recommender_inputs() -> Inputs:
    """One bag is empty."""
    offsets = torch.tensor([[0, 3, 5, 9], [0, 4, 4, 8], [0, 1, 2, 11]])
    return {"dense": torch.randn(4, 13), "items": torch.randint(0, 50, (3, 14)), "offsets": offsets}


OTHER_MODELS = (
    ZooModel("wav2vec2", _wav2vec2, _wav2vec2_inputs, breaks=True),
    # Autocast is off by 0.19, because it rounds the places whose sines are taken: a bound of 1.1 of that says little.
    ZooModel("sam", _sam, _sam_inputs),
    ZooModel("detr", _detr, _detr_inputs, breaks=True),
    ZooModel("unet", _unet, _unet_inputs),
    ZooModel("dit", _dit, _dit_inputs),
    ZooModel("vae", _vae, partial(pixels, 32, "sample")),
    ZooModel("gnn", _GraphNetwork, _graph_inputs),
    ZooModel("recommender", _Recommender, _recommender_inputs),
)
