"""Make src/patchbayes/data/fashion/fashion.npz, the images that come with the library, from Fashion-MNIST.

300 training and 200 test images of each class, drawn by a fixed seed, each reduced to 14 x 14 pixels by averaging 2 x 2. Run
again, it writes the same bytes.

    python benchmarks/bundle_fashion.py [--data-dir DIR]
"""

import argparse
import io
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from patchbayes.data import Split, read
from patchbayes.files import write_atomically

TARGET = Path(__file__).resolve().parent.parent / "src" / "patchbayes" / "data" / "fashion" / "fashion.npz"
TRAIN, TEST = 300, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="where Fashion-MNIST lies")
    parser.add_argument("--output", type=Path, default=TARGET)
    options = parser.parse_args()
    data = read("fashion-mnist", options.data_dir, held_out=0)
    x_train, y_train = chosen(data.train, TRAIN)
    x_test, y_test = chosen(data.test, TEST)
    arrays = {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}
    write_atomically(options.output, compressed(arrays | {"classes": np.array(data.classes)}))
    print(f"{options.output}: {len(x_train)} and {len(x_test)} images, {options.output.stat().st_size:,} bytes")


def chosen(part: Split, per_class: int) -> tuple[np.ndarray, np.ndarray]:
    """So many images of each class, in mixed order: uint8 (N, 14, 14) and their classes."""
    order = torch.randperm(len(part), generator=torch.Generator().manual_seed(0))
    targets = part.targets[order]
    kept = torch.cat([order[targets == number][:per_class] for number in targets.unique()])
    kept = kept[torch.randperm(len(kept), generator=torch.Generator().manual_seed(1))]
    images, labels = part.fetch(kept)
    return halved(images).squeeze(1).numpy(), labels.to(torch.uint8).numpy()


def halved(images: Tensor) -> Tensor:
    """Each 2 x 2 pixels averaged, to the nearest level."""
    return torch.nn.functional.avg_pool2d(images.float(), 2).round().to(torch.uint8)


def compressed(arrays: dict[str, np.ndarray]) -> bytes:
    """An npz file that says nothing of when it was made."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, array in arrays.items():
            plain = io.BytesIO()
            np.lib.format.write_array(plain, array, allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), plain.getvalue(), zipfile.ZIP_DEFLATED, 9)
    return content.getvalue()


if __name__ == "__main__":
    main()
