"""Data sets on disk, in the formats in which they are given out, as tensors of bytes."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def find(folder: Path | None, *names: str) -> Path:
    """The first of some files or folders, looked for in ``folder`` and in its direct folders."""
    wanted = " or ".join(names)
    if folder is None:
        raise FileNotFoundError(f"this task needs --data, a folder with {wanted}")
    for name in names:
        for path in (folder / name, *sorted(folder.glob(f"*/{name}"))):
            if path.exists():
                return path
    raise FileNotFoundError(f"neither {folder} nor a folder in it has {wanted}")


def idx(path: Path) -> Tensor:
    """A file of bytes in the IDX format: its number of dimensions, their sizes, the bytes."""
    raw = path.read_bytes()
    dimensions = raw[3]
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is no IDX file of bytes")
    sizes = np.frombuffer(raw, ">i4", dimensions, 4).tolist()
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions).copy()).view(
        sizes
    )


def fashion_mnist(folder: Path | None) -> tuple[Tensor, Tensor]:
    """Training and test images, [n, 28, 28]."""
    names = ("FashionMNIST/raw/{}-images-idx3-ubyte", "{}-images-idx3-ubyte")
    train, test = (idx(find(folder, *(n.format(s) for n in names))) for s in ("train", "t10k"))
    return train, test


def cifar10(
    folder: Path | None, batches: int = 5
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images [n, 3, 32, 32] and labels, of the first training batches and of the test batch.

    Reads the binary version, or the one for Python, which is pickled: only from whom you trust.
    """
    found = find(folder, "cifar-10-batches-bin", "cifar-10-batches-py")
    train = [f"data_batch_{i}" for i in range(1, 1 + batches)]
    return _cifar10(found, train), _cifar10(found, ["test_batch"])


def _cifar10(folder: Path, names: list[str]) -> tuple[Tensor, Tensor]:
    images, labels = [], []
    for name in names:
        if (folder / name).exists():
            with open(folder / name, "rb") as file:
                batch = pickle.load(file, encoding="bytes")
            images.append(batch[b"data"])
            labels.append(np.asarray(batch[b"labels"]))
        else:
            records = np.fromfile(folder / f"{name}.bin", np.uint8).reshape(-1, 3073)
            images.append(records[:, 1:])
            labels.append(records[:, 0])
    pixels = torch.from_numpy(np.concatenate(images)).view(-1, 3, 32, 32)
    return pixels, torch.from_numpy(np.concatenate(labels).astype(np.int64))


def nuclei(folder: Path | None) -> tuple[Tensor, Tensor]:
    """Images [n, 3, height, width], and [n, 1, height, width] with 1 in any of the nuclei."""
    pixels, labels = nuclei_instances(folder)
    return pixels, (labels > 0).to(torch.uint8)


def nuclei_instances(folder: Path | None) -> tuple[Tensor, Tensor]:
    """Images [n, 3, height, width], and [n, 1, height, width] with each nucleus's number.

    The folder has ``images`` and ``labels``, with files of the same names; 0 is the background.
    """
    found = find(folder, "nuclei")
    paths = sorted((found / "images").glob("*.png"))
    if not paths:
        raise FileNotFoundError(f"{found / 'images'} has no PNG files")
    images = [np.asarray(Image.open(path).convert("RGB")) for path in paths]
    labels = [np.asarray(Image.open(found / "labels" / p.name)).astype(np.int32) for p in paths]
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
    return pixels, torch.from_numpy(np.stack(labels)).unsqueeze(1)


def membranes(folder: Path | None) -> tuple[Tensor, Tensor]:
    """Grey images [n, 1, height, width], and as many masks with 1 on membranes.

    The folder has ``image_00.png``, ``label_00.png`` and so on; labels are dark on membranes.
    """
    found = find(folder, "em_membrane")
    paths = sorted(found.glob("image_*.png"))
    if not paths:
        raise FileNotFoundError(f"{found} has no image_*.png")
    labels = [path.with_name(path.name.replace("image", "label")) for path in paths]
    both = ([np.asarray(Image.open(p).convert("L")) for p in group] for group in (paths, labels))
    images, masks = (torch.from_numpy(np.stack(group)).unsqueeze(1) for group in both)
    return images, (masks < 128).to(torch.uint8)


def characters(folder: Path | None, name: str = "shakespeare.txt") -> tuple[Tensor, int]:
    """A text as numbers of characters, and how many different ones there are."""
    data = torch.frombuffer(bytearray(find(folder, name).read_bytes()), dtype=torch.uint8)
    known, codes = data.unique(return_inverse=True)
    return codes, len(known)
