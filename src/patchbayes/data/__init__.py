"""Data sets: readers of usual layouts, splits, preparation of raw examples, downloads, image corruptions."""

from .arrays import from_arrays
from .contents import Contents
from .corrupted_folders import read_corrupted
from .corruptions import CORRUPTIONS, SEVERITIES, CorruptedSplit, corrupt
from .csv_file import csv_rows
from .dataset import Dataset
from .image_files import ImageFileSplit, decode_image, decode_images
from .preparation import Augmentation, Preparation
from .reading import read
from .splits import ArraySplit, Split, Task

__all__ = [
    "CORRUPTIONS",
    "SEVERITIES",
    "ArraySplit",
    "Augmentation",
    "Contents",
    "CorruptedSplit",
    "Dataset",
    "ImageFileSplit",
    "Preparation",
    "Split",
    "Task",
    "corrupt",
    "csv_rows",
    "decode_image",
    "decode_images",
    "from_arrays",
    "read",
    "read_corrupted",
]
