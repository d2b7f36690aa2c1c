"""timm and diffusers: the modes, averages and pipelines of the libraries around a compiled model."""

import copy

import diffusers
import pytest
import timm
import timm.utils
import torch
import torch.nn.functional as F

from tests.spine import counted

pytestmark = pytest.mark.slow
FLOAT32 = {"precision": "float32"}
# Sums of up to 4608 terms in 20 layers, each normalized: errors of 1e-7 grow by about a hundred.
CLOSE = dict(rtol=1e-3, atol=1e-4)


def test_a_timm_model_trains_with_an_average_of_its_weights():
    torch.manual_seed(0)
    mine = timm.create_model("resnet18", num_classes=10)
    eager = copy.deepcopy(mine)
    images, target = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))
    losses = {}
    for name, model, call in (
        ("mine", mine, torch.compile(mine, backend="kp_tpu", options=FLOAT32)),
        ("eager", eager, eager),
    ):
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        average = timm.utils.ModelEmaV3(model, decay=0.5)
        losses[name] = []
        for _ in range(4):
            loss = F.cross_entropy(call(images), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update(model)
            losses[name].append(loss.item())
        model.eval(), average.module.eval()
        with torch.no_grad():
            losses[name] += [F.cross_entropy(call(images), target).item()]
            losses[name] += [F.cross_entropy(average.module(images), target).item()]
    torch.testing.assert_close(torch.tensor(losses["mine"]), torch.tensor(losses["eager"]), **CLOSE)
    for (key, a), b in zip(mine.state_dict().items(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, **CLOSE, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "convnext_atto"])
def test_a_timm_model_in_channels_last_and_features(name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10).eval()
    images = torch.randn(2, 3, 224, 224)
    run = torch.compile(model, backend="kp_tpu", options=FLOAT32)
    with torch.no_grad():
        torch.testing.assert_close(run(images), model(images), **CLOSE)
        last = images.to(memory_format=torch.channels_last)
        torch.testing.assert_close(run(last), model(last), **CLOSE)
        features = torch.compile(model.forward_features, backend="kp_tpu", options=FLOAT32)
        torch.testing.assert_close(features(images), model.forward_features(images), **CLOSE)


def denoiser():
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def images(unet, scheduler, **how):
    pipeline = diffusers.DDPMPipeline(unet, scheduler())
    pipeline.set_progress_bar_config(disable=True)
    drawn = pipeline(num_inference_steps=5, generator=torch.Generator().manual_seed(0), output_type="np", **how).images
    return torch.from_numpy(drawn)


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_a_pipeline_draws_the_images_of_eager(how):
    unet, expected = denoiser(), images(denoiser(), diffusers.DDPMScheduler)
    if how == "in place":
        unet.compile(backend="kp_tpu", options=FLOAT32)
    else:
        unet = torch.compile(unet, backend="kp_tpu", options=FLOAT32)
    with counted() as count:
        found = images(unet, diffusers.DDPMScheduler)
    assert count.graphs + count.capture_hits == 1  # for five steps
    torch.testing.assert_close(found, expected, **CLOSE)


def test_repeated_blocks_of_a_diffusion_model():
    torch.manual_seed(0)
    sizes = dict(sample_size=8, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=2)
    model = diffusers.DiTTransformer2DModel(**sizes, out_channels=4, norm_num_groups=4).eval()
    model._repeated_blocks = ["BasicTransformerBlock"]
    given = dict(
        hidden_states=torch.randn(2, 4, 8, 8), timestep=torch.tensor([1, 2]), class_labels=torch.tensor([0, 1])
    )
    with torch.no_grad():
        expected = model(**given).sample
        model.compile_repeated_blocks(backend="kp_tpu", options=FLOAT32)
        with counted() as count:
            found = model(**given).sample
    assert count.programs <= 2  # the first of the three blocks may read its input in other strides
    torch.testing.assert_close(found, expected, **CLOSE)


def test_a_pipeline_is_saved_as_it_was_before(tmp_path):
    unet = denoiser()
    unet.compile(backend="kp_tpu", options=FLOAT32)
    before = images(unet, diffusers.DDPMScheduler)
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler()).save_pretrained(tmp_path)
    loaded = diffusers.DDPMPipeline.from_pretrained(tmp_path)
    torch.testing.assert_close(images(loaded.unet, diffusers.DDPMScheduler), before, **CLOSE)
