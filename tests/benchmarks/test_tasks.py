"""What the convergence benchmark trains: its loaders, its batches, its losses."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from benchmarks.convergence import search, tasks
from benchmarks.convergence.contestants import CONTESTANTS
from benchmarks.networks import CifarResNet, Transformer, UNet
from kaisa_optim import KFACLAMB, KFACSGD

# ---- batches ----


def test_an_epoch_has_every_example_once():
    places = tasks.epochs(10, 4, torch.Generator().manual_seed(0))
    first, second = ([next(places), next(places)] for _ in range(2))
    for epoch in (first, second):
        assert all(len(batch) == 4 for batch in epoch)
        assert len(torch.cat(epoch).unique()) == 8  # two are left over
    assert torch.cat(first).tolist() != torch.cat(second).tolist()
    with pytest.raises(ValueError, match="11 of 10 examples"):
        next(tasks.epochs(10, 11, torch.Generator()))


def pictures():
    generator = torch.Generator().manual_seed(5)
    images = torch.randint(256, (64, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return images, torch.randint(10, (64,), generator=generator)


def nuclei():
    generator = torch.Generator().manual_seed(5)
    masks = torch.randint(2, (9, 1, 140, 150), generator=generator, dtype=torch.uint8)
    return 255 * masks.repeat(1, 3, 1, 1), masks


def text():
    return torch.randint(65, (4000,), generator=torch.Generator().manual_seed(5))


def flat():
    return torch.randint(256, (64, 20), generator=torch.Generator().manual_seed(5)).byte()


SMALL = {
    "fashion": (tasks.fashion(16, 3), flat, lambda: nn.Linear(20, 20)),
    "resnet8": (tasks.resnet8(16, 3), pictures, lambda: CifarResNet(8)),
    "unet": (tasks.unet(2, 3), nuclei, lambda: UNet(3, (2, 4))),
    "masked": (tasks.TASKS["masked"], text, lambda: Transformer(66, 64, 8, 1, 2, 16)),
}


class Watched(nn.Module):
    """Keeps what it is trained on; draws some of torch's own random numbers in each pass."""

    def __init__(self, inner, seen, draws):
        super().__init__()
        self.inner, self.seen, self.draws = inner, seen, draws

    def forward(self, x):
        if self.training:
            self.seen.append(x.clone())
            torch.rand(self.draws)
        return self.inner(x)


@pytest.mark.parametrize("name", SMALL)
def test_all_contestants_see_the_same_batches(name):
    task, make, network = SMALL[name]
    data = (make(),) * 2
    x, y = next(task.batches(data[0], torch.Generator()))[0]
    seen = []
    for draws, one in enumerate(("LAMB", "KFACSGD", "KFACLAMB")):
        kept = []
        watched = dataclasses.replace(
            task,
            network=lambda kept=kept, draws=draws: Watched(network(), kept, draws),
            measured=lambda part: iter([(x[:1], y[:1])]),
            every=99,
        )
        settings = CONTESTANTS[one].draw("0", 1)[0]
        search.train(watched, data, CONTESTANTS[one], settings, seed=3, steps=3)
        seen.append(torch.stack(kept))
    assert len(seen[0]) == 3
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0][0], seen[0][-1])


def test_crops_and_masks_belong_together():
    batches = tasks.unet(4, 3).batches(nuclei(), torch.Generator().manual_seed(0))
    for _ in range(3):
        ((images, masks),) = next(batches)
        assert images.shape == (4, 3, 128, 128) and masks.shape == (4, 1, 128, 128)
        assert torch.equal(images, masks.expand_as(images))


def test_masked_tokens_are_hidden_and_others_are_not_in_the_loss():
    data = torch.arange(4000) % 65
    ((shown, target),) = next(tasks.TASKS["masked"].batches(data, torch.Generator()))
    chosen = target != -100
    assert 0.13 < chosen.float().mean() < 0.17
    rows = torch.where(chosen, target, shown)
    assert ((rows[:, 1:] - rows[:, :-1]) % 65 == 1).all()  # the passages as they were
    hidden = (shown == 65)[chosen].float().mean()
    same = (shown == target)[chosen].float().mean()
    assert 0.75 < hidden < 0.85 and 0.07 < same < 0.14 and not (shown == 65)[~chosen].any()


# ---- losses ----


def language_model():
    torch.manual_seed(0)
    return Transformer(66, 64, 8, 1, 2, 16, causal=False).double()


def ragged():
    """Three micro-batches with unlike numbers of passages and of masked tokens."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for passages, share in ((2, 0.1), (3, 0.5), (1, 0.02)):
        x = torch.randint(66, (passages, 64), generator=generator)
        chosen = torch.rand(x.shape, generator=generator) < share
        chosen[0, 0] = True
        found.append((x, torch.where(chosen, x, -100)))
    return found


def joined(step):
    return [tuple(torch.cat(parts) for parts in zip(*step, strict=True))]


@pytest.mark.filterwarnings("ignore:the base optimizer updates these")
@pytest.mark.parametrize("cls", [KFACSGD, KFACLAMB])
def test_accumulated_micro_batches_are_one_batch(cls):
    task, ends, terms = tasks.TASKS["masked"], [], []
    for shape in (lambda step: step, joined):
        model = language_model()
        papers = {"compute_method": "eigen", "kl_clip": None}  # which are told the terms
        optimizer = cls(model, lr=0.1, inv_update_steps=1, factor_update_steps=1, **papers)
        for _ in range(2):
            search.backward(task, model, [optimizer], shape(ragged()))
            optimizer.step()
        terms.append(optimizer.preconditioner.loss_terms)
        ends.append([p.detach().clone() for p in model.parameters()])
    assert terms == [sum(int((y != -100).sum()) for _, y in ragged())] * 2
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-10)
