"""Images in shards, as webdataset writes them: tar files with KEY.jpg and KEY.cls for each image.

The headers of all shards are read once. Then any image can be read by its place, so that a run
sees the same images after a restart, whatever the number of shards and ranks.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import torch
from PIL import Image
from torch.utils.data import Dataset

IMAGES = ("jpg", "jpeg", "png")


class Shards(Dataset[tuple[Image.Image, int]]):
    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.tar"))
        rows = [(i, *row) for i, path in enumerate(self.paths) for row in _rows(path)]
        # [images, 4]: the shard, the offset there, the number of bytes, the class.
        self.rows = torch.tensor(rows).view(-1, 4)
        self.classes = range(int(self.rows[:, 3].max()) + 1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> tuple[Image.Image, int]:
        shard, offset, size, label = self.rows[place].tolist()
        with open(self.paths[shard], "rb") as file:
            file.seek(offset)
            return Image.open(io.BytesIO(file.read(size))).convert("RGB"), label


def _rows(path: Path) -> list[tuple[int, int, int]]:
    """Return offset, number of bytes and class of each image in a shard, in the shard's order."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    with tarfile.open(path, "r:") as tar:
        for member in tar:
            folder, _, name = member.name.rpartition("/")
            key, _, kind = name.partition(".")
            if kind.lower() in IMAGES:
                images[f"{folder}/{key}"] = member.offset_data, member.size
            elif kind == "cls" and (file := tar.extractfile(member)) is not None:
                labels[f"{folder}/{key}"] = int(file.read())
    if lacking := images.keys() ^ labels.keys():
        name = min(lacking).lstrip("/")
        raise ValueError(f"{path}: {name} needs both an image ({', '.join(IMAGES)}) and a .cls")
    return [(*images[key], labels[key]) for key in images]
